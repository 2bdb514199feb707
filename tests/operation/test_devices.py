"""Runs tests on eight devices, whose number is fixed when JAX starts."""

import pytest

from tests.processes import on_devices


@pytest.mark.parametrize("name", ["over_mesh"])
def test_on_eight_devices(name):
    on_devices(8, "-m", "pytest", "-p", "no:cacheprovider", f"tests/operation/{name}.py")
