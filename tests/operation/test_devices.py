"""Runs tests on eight devices, whose number is fixed when JAX starts."""

import pytest

from tests.processes import on_devices


@pytest.mark.long
def test_on_eight_devices():
    on_devices(8, "-m", "pytest", "-p", "no:cacheprovider", "tests/operation/over_mesh.py")
