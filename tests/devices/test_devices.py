"""Runs tests on several devices, whose number is fixed when JAX starts."""

import pytest

from tests.compiling import XLA_FLAGS
from tests.processes import on_devices


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("uses", 8),
        ("many", 16),
        pytest.param("probes", 8, marks=pytest.mark.long),
        *(pytest.param("many", n, marks=pytest.mark.long) for n in (2, 4, 8, 64)),
    ],
)
def test_on_devices(name, devices):
    file = f"tests/devices/over_{name}.py"
    on_devices(devices, "-m", "pytest", "-p", "no:cacheprovider", file, flags=XLA_FLAGS)
