"""Describes the machine that an experiment runs on."""

import contextlib
import os
import platform
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax


def environment(*plugins: str) -> dict[str, Any]:
    """Returns properties on which digits of results depend; none identifies the machine.

    `plugins` are further packages to name, which are not imported.
    """
    device = jax.devices()[0]
    cpuinfo = Path("/proc/cpuinfo")  # Linux's: lines of "name : value"
    said = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
    about = dict(re.findall(r"^(model name|cpu family|model)\s*: (.*)$", said, re.MULTILINE))
    found = {
        "device": f"{device.platform}: {device.device_kind}",
        "processor": ", ".join([platform.machine(), *about.values()]),
        "cores": cores(),
        "python": platform.python_version(),
    }
    used = ("jax", "jaxlib", "equinox", "numpy", "optax", "flax", "torch")
    for package in (*filter(sys.modules.__contains__, used), *plugins):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def device_name() -> str:
    """Returns the device's name for files: "nvidia-h100-80gb-hbm3"."""
    return re.sub(r"[^a-z0-9]+", "-", jax.devices()[0].device_kind.lower()).strip("-")


def cores() -> int:
    """Returns the number of cores that this process, and so XLA, may use."""
    linux = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if linux else os.cpu_count() or 1
