"""Tests that jax is one that was tested, and says where to look if it is not."""

import re
import tomllib

import jax
from packaging.requirements import Requirement
from packaging.version import Version

from tests.processes import ROOT

# The files with interfaces that a new jax may change without a deprecation.
UNSTABLE = (
    r"grep -rlE 'jax(\.| import )(_src|config\.values|core|experimental|extend|interpreters)"
    r"|\.(eqns|manual_axis_type)\b' eqx_norm/ strategies/ --include=*.py"
)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
(RANGE,) = (r for r in map(Requirement, PROJECT["dependencies"]) if r.name == "jax")


def test_the_installed_jax_was_tested():
    assert RANGE.specifier.contains(jax.__version__, prereleases=True), (
        f"jax {jax.__version__} is installed, and eqx-norm is tested with {RANGE}. Run make "
        "lint and make test with it. If one fails, look first at the files that this prints; "
        f"then widen the range in pyproject.toml:\n  {UNSTABLE}"
    )


def test_the_range_is_what_the_constraints_pin():
    """The oldest and the newest minor version are each tested with."""
    pins = []
    for file in ("oldest-jax.txt", "newest-jax.txt"):
        text = (ROOT / "scripts" / "constraints" / file).read_text(encoding="utf-8")
        pins += map(Version, re.findall(r"^jax==(.+)$", text, re.MULTILINE))
    oldest, newest = pins
    expected = {f">={oldest.major}.{oldest.minor}", f"<{newest.major}.{newest.minor + 1}"}
    assert {str(specifier) for specifier in RANGE.specifier} == expected
