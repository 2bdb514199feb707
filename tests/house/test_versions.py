"""Tests that jax is one that was tested, and says where to look if it is not."""

import ast
import re
import tomllib

import jax
import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.house.test_architecture import imports
from tests.processes import ROOT

# What a new jax may change without a deprecation.
UNSTABLE = re.compile(
    r"jax\.(_src|config\.values|core|experimental|extend|interpreters)\b"
    r"|.*\.(eqns|manual_axis_type)$"
)


def unstable() -> dict[str, list[str]]:
    """Returns the unstable interfaces that the package uses, by the file that uses them."""
    interfaces = {}
    for path in sorted([*ROOT.glob("eqx_norm/**/*.py"), *ROOT.glob("strategies/*.py")]):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        names = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
        names = filter(UNSTABLE.match, names | {*imports(path)})
        interfaces[str(path.relative_to(ROOT))] = sorted(names)
    return {file: names for file, names in interfaces.items() if names}


def requirement() -> Requirement:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (jax,) = (r for r in map(Requirement, project["dependencies"]) if r.name == "jax")
    return jax


def advice(version: str) -> str:
    """Returns what to do about a jax that was not tested, or nothing."""
    if requirement().specifier.contains(version, prereleases=True):
        return ""
    return (
        f"jax {version} is installed, and eqx-norm is tested with {requirement()}. Run make "
        "lint and make test with it. If one fails, look first at these files, which use "
        "interfaces that jax may change; then widen the range in pyproject.toml:\n"
        + "\n".join(f"  {file}: {', '.join(names)}" for file, names in unstable().items())
    )


def test_the_installed_jax_was_tested():
    assert not advice(jax.__version__), advice(jax.__version__)


@pytest.mark.parametrize("version", ["0.1", "99.0.0.dev20990101"])
def test_an_untested_jax_names_the_files_to_look_at(version):
    assert f"jax {version} is installed, and eqx-norm is tested with jax<" in advice(version)
    assert "eqx_norm/_normalise/passes.py: jax.extend.core.Primitive," in advice(version)


def test_the_range_is_what_the_constraints_pin():
    """The oldest and the newest minor version are each tested with."""
    pins = []
    for file in ("oldest-jax.txt", "newest-jax.txt"):
        text = (ROOT / "scripts" / "constraints" / file).read_text(encoding="utf-8")
        pins += map(Version, re.findall(r"^jax==(.+)$", text, re.MULTILINE))
    oldest, newest = pins
    expected = {f">={oldest.major}.{oldest.minor}", f"<{newest.major}.{newest.minor + 1}"}
    assert {str(specifier) for specifier in requirement().specifier} == expected
