"""The device at hand, and what is known of it."""

import os
import re
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import jax

from . import results

DRIVER = Path("/proc/driver/nvidia/version")
NO_GPU = (
    "experiments.gpu measures a GPU, and JAX finds none here ({found}). Run it on a machine "
    "that has one, in an environment with jax[cuda13] or jax[cuda12] (make gpu sets it up); or "
    "rehearse all of it here, with small arrays and no word on speed: "
    "python -m experiments.gpu --device cpu"
)


def why_not(device: str) -> str | None:
    """Why the job cannot run on the device asked for; `None` where it can.

    Has to be asked first of all: it says which of JAX's platforms is used, and leaves half of
    a GPU's memory to torch.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    if device == "cpu":
        jax.config.update("jax_platforms", "cpu")
        return None
    try:
        found = jax.devices()[0].platform
    except RuntimeError as error:  # a plugin without a driver
        found = str(error).partition("\n")[0]
    return None if found == "gpu" else NO_GPU.format(found=found)


def stem() -> str:
    """Of the files of this device."""
    device = jax.devices()[0]
    kind = "cpu" if device.platform == "cpu" else device.device_kind
    return "gpu_" + re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-")


def environment() -> dict[str, Any]:
    """Device and versions of all that the numbers depend on."""
    found = results.environment()
    named = ((d.metadata["Name"] or "", d.version) for d in distributions())
    installed = {name.lower().replace("_", "-"): version for name, version in named}
    about = ("flax", "optax", "jax-cuda", "nvidia-cudnn", "torch", "triton")
    found |= {name: installed[name] for name in sorted(installed) if name.startswith(about)}
    found["platform"] = " ".join(jax.devices()[0].client.platform_version.split())
    if DRIVER.exists():
        found["driver"] = DRIVER.read_text(encoding="utf-8").partition("\n")[0]
    return found
