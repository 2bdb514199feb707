"""Tests that jax is one that was tested, and says where to look if it is not."""

import ast
import re
import tomllib
from pathlib import Path

import jax
import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.house.test_architecture import PACKAGE, STRATEGIES, imports, inside
from tests.processes import ROOT

# Files that use what a new jax may change without a deprecation, and what each uses.
UNSTABLE = {
    "eqx_norm/_memory.py": "manual_axis_type",
    "eqx_norm/_normalise/collectives.py": (
        "jax.core jax.extend jax.interpreters manual_axis_type"
    ),
    "eqx_norm/_normalise/elementwise.py": "jax.extend manual_axis_type",
    "eqx_norm/_normalise/gpu/kernel.py": "jax.experimental manual_axis_type",
    "eqx_norm/_normalise/jaxprs.py": "eqns",
    "eqx_norm/_normalise/linear.py": "jax.core jax.extend jax.interpreters",
    "eqx_norm/_normalise/one_kernel.py": "jax.extend jax.interpreters",
    "eqx_norm/_normalise/primitives.py": "jax.extend jax.interpreters",
    "eqx_norm/_normalise/tpu/kernel.py": "jax.experimental manual_axis_type",
    "eqx_norm/_normalise/tpu/rows.py": "jax.interpreters",
    "eqx_norm/determinism/_program.py": "jax.extend jax.interpreters eqns manual_axis_type",
    "eqx_norm/determinism/_recipe.py": "jax.config.values",
}
MODULES = ("jax._src", "jax.core", "jax.experimental", "jax.extend", "jax.interpreters")
ATTRIBUTES = ("eqns", "manual_axis_type")


def uses(path: Path) -> set[str]:
    """Returns what a file uses of the modules and attributes above."""
    found = {module for name in imports(path) for module in MODULES if inside(name, module)}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            found |= {module for module in MODULES if inside(name, module)}
            found |= {node.attr} & {*ATTRIBUTES} | {name} & {"jax.config.values"}
    return found


def test_the_list_of_files_is_complete():
    files = [*PACKAGE.glob("*.py"), *STRATEGIES.rglob("*.py")]
    files += [f for d in PACKAGE.iterdir() if not d.is_symlink() for f in d.rglob("*.py")]
    found = {str(file.relative_to(ROOT)): uses(file) for file in files}
    listed = {file: set(names.split()) for file, names in UNSTABLE.items()}
    assert {file: names for file, names in found.items() if names} == listed


# --- The range of pyproject.toml.


def requirement() -> Requirement:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (jax,) = (r for r in map(Requirement, project["dependencies"]) if r.name == "jax")
    return jax


def problem(version: str) -> str:
    """Returns what to do about a jax that was not tested, or nothing."""
    required = requirement()
    if required.specifier.contains(version, prereleases=True):
        return ""
    return (
        f"jax {version} is installed, and eqx-norm is tested with {required}. Run make lint "
        "and make test with it. If one fails, look at these files first, which use interfaces "
        "that jax may change; then widen the range in pyproject.toml:\n"
        + "\n".join(f"  {file}: {names}" for file, names in UNSTABLE.items())
    )


def test_the_installed_jax_was_tested():
    found = problem(jax.__version__)
    assert not found, found


@pytest.mark.parametrize("version", ["0.9.2", "0.13.0.dev20270101", "0.13.0", "1.0"])
def test_an_untested_jax_names_the_files_to_look_at(version):
    said = problem(version)
    assert said.startswith(
        f"jax {version} is installed, and eqx-norm is tested with jax<0.13,>=0.10"
    )
    assert all(file in said for file in UNSTABLE)


def test_the_range_is_what_the_constraints_pin():
    """The oldest and the newest minor version are each tested with."""
    pins = [
        Version(re.findall(r"^jax==(.+)$", (ROOT / file).read_text(encoding="utf-8"), re.M)[0])
        for file in ("constraints.txt", "constraints-newest.txt")
    ]
    low, high = ((pin.major, pin.minor + more) for pin, more in zip(pins, (0, 1), strict=True))
    expected = {">={}.{}".format(*low), "<{}.{}".format(*high)}
    assert {str(specifier) for specifier in requirement().specifier} == expected
