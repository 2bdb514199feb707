"""Tests that imports go one way, as CONTRIBUTING.md says, and that there is one copy of all."""

import ast
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import jaxtyping
import pytest

import eqx_norm.strategies
from tests.processes import ROOT

STRATEGIES, PACKAGE, EXPERIMENTS = (ROOT / n for n in ("strategies", "eqx_norm", "experiments"))
OPERATION, PROBE = PACKAGE / "_normalise", PACKAGE / "determinism"
GPU = "eqx_norm._normalise.gpu"
PYTHON = ("abc", "collections", "dataclasses", "functools", "math", "typing")


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


def inside(name: str, *modules: str) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def files(folder: Path, *, but: str = "nothing") -> list[Path]:
    return sorted(
        path for path in folder.rglob("*.py") if not path.is_relative_to(folder / but)
    )


# Which files, and whether they may import what has that name.
ARROWS = {
    "strategies know only their siblings": (
        files(STRATEGIES),
        lambda name: inside(name, *PYTHON, "jax", "jaxtyping", "equinox", "strategies"),
    ),
    # And how they round a product, which is the same in both.
    "the operation knows of the package only moments and pairs": (
        files(OPERATION),
        lambda name: (
            inside(name, "eqx_norm._normalise", "eqx_norm.strategies.Moments")
            or name == "eqx_norm.strategies.Pair"
            or name == "eqx_norm.strategies._pair.rounded"
            or not inside(name, "eqx_norm")
        ),
    ),
    # The others ask `gpu/choice.py`, so that no kernel is imported where none is taken.
    "only the gpu folder, and one file for TPUs, know Pallas": (
        [f for f in files(OPERATION, but="gpu") if f != OPERATION / "tpu" / "kernel.py"],
        lambda name: (
            "pallas" not in name and (inside(name, f"{GPU}.choice") or not inside(name, GPU))
        ),
    ),
    "the gpu folder is imported without its kernels": (
        [OPERATION / "gpu" / "__init__.py"],
        lambda name: inside(name, f"{GPU}.choice"),
    ),
    "the probe knows nothing of the layers": (
        files(PROBE),
        lambda name: inside(name, "eqx_norm.determinism") or not inside(name, "eqx_norm"),
    ),
    "the layers know nothing of models": (
        # But the first, which offers them.
        [f for f in files(PACKAGE, but="models") if f != PACKAGE / "__init__.py"],
        lambda name: not inside(name, "eqx_norm.models"),
    ),
    "models know the layers, not how they calculate": (
        # But the policy, which knows the names of operations.
        [f for f in files(PACKAGE / "models") if f.name != "_recompute.py"],
        lambda name: (
            not inside(name, "eqx_norm._normalise", "eqx_norm.determinism")
            or name == "eqx_norm._normalise.Activation"
        ),
    ),
    "the layers know nothing of the probe": (
        # But the first, which offers both.
        [f for f in files(PACKAGE, but="determinism") if f != PACKAGE / "__init__.py"],
        lambda name: not inside(name, "eqx_norm.determinism"),
    ),
    "experiments use the public interface": (
        files(EXPERIMENTS),
        lambda name: not (inside(name, "eqx_norm") and "._" in name),
    ),
    "an experiment knows no other": (
        files(EXPERIMENTS),
        lambda name: inside(name, "experiments.common") or not inside(name, "experiments"),
    ),
}


@pytest.mark.parametrize("arrow", ARROWS)
def test_imports_go_one_way(arrow):
    paths, allowed = ARROWS[arrow]
    assert paths
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in paths
        for name in imports(path)
        if not allowed(name)
    ]
    assert not wrong


def test_the_package_s_strategies_are_a_link_to_those_at_top_level():
    link = PACKAGE / "strategies"
    assert link.is_symlink()
    assert not link.readlink().is_absolute()
    assert link.resolve() == STRATEGIES
    assert Path(eqx_norm.strategies.__file__).resolve() == STRATEGIES / "__init__.py"


def test_annotations_are_checked_while_testing():
    with pytest.raises(jaxtyping.TypeCheckError):
        eqx_norm.strategies.Moments(jnp.ones(()), jnp.ones(3), jnp.ones(3, int))


def test_the_layer_has_no_branch_on_the_strategy():
    code = ast.parse((PACKAGE / "_batch_norm.py").read_text(encoding="utf-8"))
    for node in ast.walk(code):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
            assert "approach" not in ast.unparse(node)
