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


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """Yields the full dotted name of everything that a file imports, also inside functions."""
    package = ".".join(path.parent.relative_to(ROOT).parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            module = [*above, node.module] if node.level else [node.module]
            base = ".".join(part for part in module if part)
            yield from (f"{base}.{alias.name}" for alias in node.names)


def inside(name: str, *modules: str) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def assert_imports(path: Path, allowed: bool, name: str) -> None:
    assert allowed, f"{path.relative_to(ROOT)} imports {name}"


# --- The package.


def test_the_package_s_strategies_are_a_link_to_those_at_top_level():
    link = PACKAGE / "strategies"
    assert link.is_symlink()
    assert not link.readlink().is_absolute()
    assert link.resolve() == STRATEGIES
    assert Path(eqx_norm.strategies.__file__).resolve() == STRATEGIES / "__init__.py"


def test_annotations_are_checked_while_testing():
    with pytest.raises(jaxtyping.TypeCheckError):
        eqx_norm.strategies.Running(jnp.ones(3), jnp.ones(4), jnp.ones(()))


def test_strategies_know_only_their_siblings():
    python = ("abc", "collections", "dataclasses", "functools", "typing")
    for path in files(STRATEGIES):
        for name in imports(path):
            allowed = inside(name, *python, "jax", "jaxtyping", "equinox", "strategies")
            assert_imports(path, allowed, name)


def test_every_strategy_fits_on_a_page():
    for path in files(STRATEGIES):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 120, path


def test_the_operation_knows_of_the_package_only_moments():
    """And how they round a product, which is the same in both."""
    known = "eqx_norm.strategies.Moments", "eqx_norm.strategies._pair.rounded"
    for path in files(OPERATION):
        for name in imports(path):
            allowed = name in known or not inside(name, "eqx_norm")
            assert_imports(path, allowed or inside(name, "eqx_norm._normalise"), name)


@pytest.mark.xfail(
    not (OPERATION / "gpu").is_dir(), strict=True, reason="kernels are not in gpu/ yet"
)
def test_only_the_gpu_folder_knows_pallas():
    """The others ask `gpu/choice.py`, so that no kernel is imported where none is taken."""
    gpu = "eqx_norm._normalise.gpu"
    for path in files(OPERATION):
        if path.is_relative_to(OPERATION / "gpu"):
            continue
        for name in imports(path):
            allowed = inside(name, f"{gpu}.choice") or not inside(name, gpu)
            assert_imports(path, allowed and "pallas" not in name, name)
    # What is imported here is imported with the package.
    for name in imports(OPERATION / "gpu" / "__init__.py"):
        assert_imports(OPERATION / "gpu" / "__init__.py", inside(name, f"{gpu}.choice"), name)


def test_the_probe_and_the_layers_know_nothing_of_each_other():
    for path in files(PACKAGE):
        for name in imports(path):
            if path.is_relative_to(PROBE):
                allowed = inside(name, "eqx_norm.determinism") or not inside(name, "eqx_norm")
                assert_imports(path, allowed, name)
            elif path != PACKAGE / "__init__.py":  # which offers both
                assert_imports(path, not inside(name, "eqx_norm.determinism"), name)


def test_the_layer_has_no_branch_on_the_strategy():
    code = ast.parse((PACKAGE / "_batch_norm.py").read_text(encoding="utf-8"))
    for node in ast.walk(code):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
            assert "approach" not in ast.unparse(node)


@pytest.mark.parametrize("folder", [STRATEGIES, PROBE], ids=lambda folder: folder.name)
def test_the_init_is_a_table_of_contents(folder):
    docstring, *rest = ast.parse((folder / "__init__.py").read_text(encoding="utf-8")).body
    assert isinstance(docstring, ast.Expr)
    assert all(isinstance(node, ast.ImportFrom) for node in rest)


# --- The experiments.


def private(name: str) -> bool:
    parts = name.split(".")
    return parts[0] == "eqx_norm" and any(part.startswith("_") for part in parts)


@pytest.mark.xfail(
    not (EXPERIMENTS / "compiled").is_dir(), strict=True, reason="not in folders yet"
)
def test_experiments_use_the_public_api():
    """But those of `compiled/`, which look at one kernel at a time."""
    for path in files(EXPERIMENTS):
        if not path.is_relative_to(EXPERIMENTS / "compiled"):
            for name in imports(path):
                assert_imports(path, not private(name), name)


@pytest.mark.xfail(not (EXPERIMENTS / "lab").is_dir(), strict=True, reason="not in folders yet")
def test_experiments_share_nothing_but_the_laboratory():
    assert (EXPERIMENTS / "lab").is_dir()
    for folder in {path.parent for path in EXPERIMENTS.glob("*/*.py")}:
        own = (f"experiments.{folder.name}", "experiments.lab")
        for path in files(folder):
            for name in imports(path):
                allowed = inside(name, *own) or not inside(name, "experiments")
                assert_imports(path, allowed, name)
