"""Runs tests on several devices, whose number is fixed when JAX starts."""

import pytest

from tests.compiling import XLA_FLAGS
from tests.processes import on_devices

LONG = [("uses", 8, "long"), ("probes", 8, ""), *(("many", n, "") for n in (2, 4, 8, 64))]


@pytest.mark.parametrize(
    ("name", "devices", "marked"),
    [
        ("uses", 8, "not long"),
        ("many", 16, ""),
        *(pytest.param(*run, marks=pytest.mark.long) for run in LONG),
    ],
)
def test_on_devices(name, devices, marked):
    options = "-m", "pytest", "-p", "no:cacheprovider", "-m", marked
    on_devices(devices, *options, f"tests/devices/over_{name}.py", flags=XLA_FLAGS)
