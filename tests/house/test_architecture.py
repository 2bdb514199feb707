"""The arrows of the house go one way, and there is one copy of everything."""

import ast
from pathlib import Path

import jax.numpy as jnp
import jaxtyping
import pytest

import eqx_norm.strategies

ROOT = Path(__file__).parents[1]
STRATEGIES = sorted((ROOT / "strategies").glob("*.py"))


def imports(path: Path) -> set[str]:
    """Everything a file imports; relative imports with their dots."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("." * node.level + (node.module or ""))
    return names


def test_the_package_s_strategies_are_a_link_to_those_at_top_level():
    link = ROOT / "eqx_norm" / "strategies"
    assert link.is_symlink()
    assert not link.readlink().is_absolute()
    assert link.resolve() == ROOT / "strategies"
    assert Path(eqx_norm.strategies.__file__).resolve() == ROOT / "strategies" / "__init__.py"


def test_annotations_are_checked_while_testing():
    with pytest.raises(jaxtyping.TypeCheckError):
        eqx_norm.strategies.Running(jnp.ones(3), jnp.ones(4), jnp.ones(()))


@pytest.mark.parametrize("path", STRATEGIES, ids=lambda path: path.stem)
def test_strategies_import_only_their_siblings(path):
    python = ("abc", "collections", "dataclasses", "functools", "typing")
    allowed = (*python, "jax", "jaxtyping", "equinox")
    for name in imports(path):
        sibling = name.startswith("._") and not name.startswith("..")
        assert sibling or name.split(".")[0] in allowed, name


def test_every_strategy_fits_on_a_page():
    for path in STRATEGIES:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 120, path


def test_the_operation_knows_of_strategies_only_their_moments():
    for path in (ROOT / "eqx_norm" / "_normalise").glob("*.py"):
        for line in path.read_text(encoding="utf-8").splitlines():
            if "strategies" in line and "import" in line:
                assert line == "from eqx_norm.strategies import Moments"


def test_the_probe_and_the_layers_know_nothing_of_each_other():
    package = ROOT / "eqx_norm"
    for path in package.rglob("*.py"):
        inside = path.is_relative_to(package / "determinism")
        for name in imports(path):
            of_layers = name.startswith(("..", "eqx_norm"))
            assert not (of_layers if inside else "determinism" in name), (path, name)


def test_the_layer_has_no_branch_on_the_strategy():
    source = (ROOT / "eqx_norm" / "_batch_norm.py").read_text(encoding="utf-8")
    code = ast.parse(source)
    for node in ast.walk(code):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
            assert "approach" not in ast.unparse(node)


def test_the_package_s_init_is_a_table_of_contents():
    for name in ("strategies", "eqx_norm/determinism"):
        code = ast.parse((ROOT / name / "__init__.py").read_text(encoding="utf-8"))
        docstring, *rest = code.body
        assert isinstance(docstring, ast.Expr)
        assert all(isinstance(node, ast.ImportFrom) for node in rest)
