"""Tests the allowed versions of jax, and where unstable interfaces of jax are used."""

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.processes import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
(RANGE,) = (r for r in map(Requirement, PROJECT["dependencies"]) if r.name == "jax")
# Interfaces that a release of jax may change without a deprecation, and the only modules that
# use them: the first place to look if a test fails with a new release.
UNSTABLE = {
    "contexts of lowering, and types of arrays": (
        r"(module|axis)_context|avals_(in|out)|manual_axis_type|ShapedArray|update_axis_types"
        r"|(aval|sharding)\.update\(",
        "_program lowering",
    ),
    "primitives": (
        r"jax\.interpreters",
        "lowering registry",
    ),
    "jaxprs": (
        r"\.eqns\b|jax\.extend",
        "jaxprs registry",
    ),
    "experimental modules": (r"jax\.experimental", "shards tile tpu_rows"),
    "private and core modules": (
        r"jax\.(_src|config\.values|core)\b|jax import core",
        "_layers _recipe lowering primitive",
    ),
}


@pytest.mark.parametrize("kind", UNSTABLE)
def test_unstable_jax_interfaces_are_used_in_the_listed_modules_only(kind):
    pattern, modules = UNSTABLE[kind]
    files = [*(ROOT / "eqx_norm").rglob("*.py"), *(ROOT / "strategies").rglob("*.py")]
    found = {f.stem for f in files if re.search(pattern, f.read_text(encoding="utf-8"))}
    assert sorted(found) == modules.split()


def test_jax_requirement_is_the_pinned_minimum_without_a_maximum():
    """Fails for a maximum, which would exclude new releases of jax. The tests run with the
    newest release each night."""
    text = (ROOT / "scripts" / "constraints" / "oldest-jax.txt").read_text(encoding="utf-8")
    (oldest,) = map(Version, re.findall(r"^jax==(.+)$", text, re.MULTILINE))
    assert str(RANGE.specifier) == f">={oldest.major}.{oldest.minor}"
