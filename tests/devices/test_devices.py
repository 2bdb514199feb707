"""Runs tests on several devices, whose number is fixed when JAX starts."""

import pytest

from tests.compiling import XLA_FLAGS
from tests.processes import on_devices


@pytest.mark.parametrize(
    ("devices", "marked", "names"),
    [
        (16, "not long", ("uses", "many")),
        pytest.param(8, "long", ("uses", "probes"), marks=pytest.mark.long),
        pytest.param(64, "long", ("many",), marks=pytest.mark.long),
    ],
)
def test_on_devices(devices, marked, names):
    files = (f"tests/devices/over_{name}.py" for name in names)
    options = "-m", "pytest", "-p", "no:cacheprovider", "-m", marked
    on_devices(devices, *options, *files, flags=XLA_FLAGS)
