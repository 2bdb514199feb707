"""Tests that imports go one way, as CONTRIBUTING.md says, and load no unused modules."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from tests.processes import ROOT, python


def imports(path: Path) -> Iterator[str]:
    """Yields the full dotted name of everything that a file imports, also inside functions."""
    package = path.parent.relative_to(ROOT).parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


# A pattern of files and folders, and a regular expression of names that they may not import.
ARROWS = {
    "strategies import only strategies, rounding and constants": (
        "strategies",
        r"eqx_norm\b(?!\._jax\.(arithmetic|constants)\b)",
    ),
    "wrappers of JAX import nothing else from the package": (
        "eqx_norm/_jax",
        r"eqx_norm\.(?!_jax\b)",
    ),
    "the operation imports only moments and wrappers of JAX from the package": (
        "eqx_norm/_normalise",
        r"eqx_norm\.(?!(_normalise|_jax)\b|strategies\.(Moments|Pair|_numbers)\b)",
    ),
    "formulas are the lowest floor of the operation": (
        "eqx_norm/_normalise/formulas",
        r"eqx_norm\._normalise\.(?!formulas\b)",
    ),
    "kernels are above formulas": (
        "eqx_norm/_normalise/kernels",
        r"eqx_norm\._normalise\.(?!(formulas|kernels)\b)",
    ),
    "variants are above kernels": (
        "eqx_norm/_normalise/variants",
        r"eqx_norm\._normalise\.(?!(formulas|kernels|variants)\b)",
    ),
    "determinism does not import the layers": (
        "eqx_norm/determinism",
        r"eqx_norm\.(?!(determinism|_jax)\b)",
    ),
    "layers import neither models nor determinism": (
        "eqx_norm/_[!_]*",
        r"eqx_norm\.(determinism|models)\b",
    ),
    "models import the layers, not the operation": (
        "eqx_norm/models",
        r"eqx_norm\.(determinism\b|_normalise\.(?!(Activation|upcast)$))",
    ),
    "private interfaces of jax are avoided": (
        "eqx_norm",
        r"jax\.(_src|core\.(?!(ShapedArray|Tracer|max_dim)$)|experimental\."
        r"(?!pallas\b|mosaic\.gpu\b|custom_partitioning\b))",
    ),
    "experiments use the public interface": ("experiments", r"eqx_norm\b.*\._"),
    "no experiment imports another": ("experiments", r"experiments\.(?!common\b)"),
}


@pytest.mark.parametrize("arrow", ARROWS)
def test_imports_go_one_way(arrow):
    pattern, forbidden = ARROWS[arrow]
    files = {f for place in ROOT.glob(pattern) for f in (place, *place.rglob("*.py"))}
    files = {file for file in files if file.suffix == ".py"}
    assert files
    assert not {
        f"{file.relative_to(ROOT)} imports {name}"
        for file in files
        for name in imports(file)
        if re.match(forbidden, name)
    }


def test_one_file_asks_which_platform_a_pass_is_for():
    files = (ROOT / "eqx_norm" / "_normalise").rglob("*.py")
    texts = {file.name: file.read_text(encoding="utf-8") for file in files}
    assert [n for n, text in texts.items() if re.search(r"\.platform\b", text)] == ["choose.py"]


def print_modules():
    """Prints the modules that Equinox does not load: after the import, and after a gradient."""
    before = set(sys.modules)
    from eqx_norm import BatchNorm

    print(*set(sys.modules) - before)
    layer, state = eqx.nn.make_with_state(BatchNorm)(4, "batch", approach="batch")
    over_batch = jax.vmap(layer, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    eqx.filter_jit(jax.grad(lambda x: jnp.sum(over_batch(x, state)[0])))(jnp.ones((2, 4)))
    print(*set(sys.modules) - before)


def test_layers_load_neither_kernels_nor_models_nor_determinism():
    printed = python("-c", f"import {__name__} as test; test.print_modules()").stdout
    imported, trained = (line.split() for line in printed.splitlines())
    assert {name.split(".")[0] for name in imported} == {"eqx_norm"}
    unused = re.compile("pallas|mosaic|eqx_norm.models|eqx_norm.determinism")
    assert list(filter(unused.search, trained)) == []
