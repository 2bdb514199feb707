"""Tests the allowed versions of jax, and where unstable interfaces of jax are used."""

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.processes import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
(RANGE,) = (r for r in map(Requirement, PROJECT["dependencies"]) if r.name == "jax")
NORMALISE, DETERMINISM = "eqx_norm/_normalise/", "eqx_norm/determinism/"
# Interfaces that a release of jax may change without a deprecation, and the only files that use
# them: the first place to look if a test fails with a new release.
UNSTABLE = {
    "contexts of lowering, and types of arrays": (
        r"(module|axis)_context|avals_(in|out)|manual_axis_type|ShapedArray|update_axis_types"
        r"|(aval|sharding)\.update\(",
        [f"{NORMALISE}lowering.py", f"{DETERMINISM}_program.py"],
    ),
    "primitives": (
        r"jax\.interpreters|jax\.extend\.core import .*Primitive",
        [
            f"{NORMALISE}collectives.py",
            f"{NORMALISE}kernels/rows.py",
            f"{NORMALISE}linear.py",
            f"{NORMALISE}lowering.py",
            f"{NORMALISE}one_kernel.py",
            f"{NORMALISE}passes.py",
            f"{NORMALISE}primitives.py",
            f"{DETERMINISM}_mark.py",
        ],
    ),
    "jaxprs": (
        r"\.eqns\b|jaxpr_as_fun|jaxprs_in_params",
        [
            f"{NORMALISE}elementwise.py",
            f"{NORMALISE}jaxprs.py",
            f"{NORMALISE}linear.py",
            f"{DETERMINISM}_program.py",
        ],
    ),
    "Pallas": (
        r"jax\.experimental",
        [f"{NORMALISE}kernels/tile.py", f"{NORMALISE}kernels/tpu_rows.py"],
    ),
    "private and core modules": (
        r"jax\.(_src|config\.values|core)\b|jax import core",
        [f"{NORMALISE}lowering.py", f"{DETERMINISM}_recipe.py", "eqx_norm/models/_layers.py"],
    ),
}


@pytest.mark.parametrize("kind", UNSTABLE)
def test_unstable_jax_interfaces_are_used_in_the_listed_files_only(kind):
    pattern, files = UNSTABLE[kind]
    sources = {*(ROOT / "eqx_norm").rglob("*.py"), *(ROOT / "strategies").rglob("*.py")}
    found = [
        path.relative_to(ROOT).as_posix()
        for path in sources
        if re.search(pattern, path.read_text(encoding="utf-8"))
    ]
    assert sorted(found) == sorted(files)


def test_jax_requirement_is_the_pinned_minimum_without_a_maximum():
    """Fails for a maximum, which would exclude new releases of jax. The tests run with the
    newest release each night."""
    text = (ROOT / "scripts" / "constraints" / "oldest-jax.txt").read_text(encoding="utf-8")
    (oldest,) = map(Version, re.findall(r"^jax==(.+)$", text, re.MULTILINE))
    assert str(RANGE.specifier) == f">={oldest.major}.{oldest.minor}"
