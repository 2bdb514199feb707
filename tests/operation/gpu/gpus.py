"""Names GPUs that are not there, to lower programs for; imports no kernel."""

import jax
import pytest

HAS_MOSAIC = jax.__version_info__ >= (0, 12)
needs_mosaic = pytest.mark.skipif(not HAS_MOSAIC, reason="the Mosaic kernels take jax 0.12")
CORES = {"NVIDIA A100-SXM4-80GB": 108, "NVIDIA H200": 132, "NVIDIA B200": 148}
H200 = "NVIDIA H200"


def mesh(kind=H200, size=1):
    """Tells jax what GPU is meant; before 0.11 it took any."""
    automatic = (jax.sharding.AxisType.Auto,)
    if jax.__version_info__ < (0, 11):
        return jax.sharding.AbstractMesh((size,), ("x",), automatic)
    device = jax.sharding.AbstractDevice(
        device_kind=kind, num_cores=CORES[kind], platform="gpu"
    )
    return jax.sharding.AbstractMesh((size,), ("x",), automatic, abstract_device=device)
