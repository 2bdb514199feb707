"""`python -m eqx_norm` prints versions, devices and settings: what a bug report needs."""

import importlib.metadata
import os
import platform

import jax

# What changes numbers or programs, besides jax_enable_x64.
_CONFIG = (
    "jax_default_matmul_precision jax_disable_jit jax_debug_nans jax_numpy_dtype_promotion "
    "jax_default_prng_impl jax_enable_pgle"
)
_VARIABLES = "XLA_FLAGS JAX_PLATFORMS CUDA_VISIBLE_DEVICES PJRT_NPROC NVIDIA_TF32_OVERRIDE"


def report() -> dict[str, str]:
    """Returns names and values, in the order in which they are printed."""
    found = {"Python": platform.python_version(), "platform": platform.platform()}
    for package in ("eqx-norm", "jax", "jaxlib", "equinox", "jaxtyping", "numpy"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    devices = [f"{device.platform} {device.device_kind}" for device in jax.devices()]
    found["devices"] = ", ".join(f"{devices.count(d)} x {d}" for d in dict.fromkeys(devices))
    found["processes"] = str(jax.process_count())
    found |= {n: str(getattr(jax.config, n)) for n in ("jax_enable_x64", *_CONFIG.split())}
    return found | {n: os.environ[n] for n in _VARIABLES.split() if n in os.environ}


if __name__ == "__main__":
    for name, value in report().items():
        print(f"{name}: {value}")
