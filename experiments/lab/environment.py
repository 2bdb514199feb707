"""Says what results were measured with: device, processor, versions.

Trained numbers differ by processor in their digits, so the files beside the results name it.
Nothing here identifies a machine.
"""

import contextlib
import os
import platform
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

_CPUINFO = Path("/proc/cpuinfo")
_DRIVER = Path("/proc/driver/nvidia/version")
# What decides in which order and how rounded compiled code sums and multiplies.
_VECTORS = re.compile(r"sse4_2|avx.*|fma.*|f16c|amx.*|asimd.*|sve.*|sme(?!p).*|bf16|i8mm")


def environment(*packages: str) -> dict[str, Any]:
    """Returns device, processor, and the versions of Python and of all that was imported.

    `packages` are named as well, where they are installed: plugins, say, that nobody imports.
    """
    device = jax.devices()[0]
    name, instructions = processor()
    found = {
        "device": f"{device.platform}: {device.device_kind}",
        "processor": name,
        "instruction set": instructions,
        "cores": cores(),
        "python": platform.python_version(),
    }
    used = ("jax", "jaxlib", "equinox", "numpy", "optax", "flax", "torch")
    for package in (*filter(sys.modules.__contains__, used), *packages):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    if device.platform != "cpu":
        found["platform"] = " ".join(device.client.platform_version.split())
        if _DRIVER.exists():
            found["driver"] = _DRIVER.read_text(encoding="utf-8").partition("\n")[0]
    return found


def device_name() -> str:
    """Returns the device as files are named after it: `cpu`, `nvidia-h100-80gb-hbm3`."""
    device = jax.devices()[0]
    kind = "cpu" if device.platform == "cpu" else device.device_kind
    return re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-")


def cores() -> int:
    """Returns how many cores this process may use, which is how many XLA uses."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor() -> tuple[str, str]:
    """Returns the processor's name, and its architecture with its vector instructions.

    What Linux says of the first core tells both; elsewhere there is less to tell.
    """
    said = _CPUINFO.read_text(encoding="utf-8") if _CPUINFO.exists() else ""
    first = said.partition("\n\n")[0]
    about = dict(re.findall(r"^(\w[\w ]*?)\s*: (.*)$", first, re.MULTILINE))
    name = about.get("model name") or platform.processor() or platform.machine()
    numbers = [f"{key} {about[key]}" for key in ("cpu family", "model") if key in about]
    flags = (about.get("flags") or about.get("Features") or "").split()
    instructions = [platform.machine(), *sorted(filter(_VECTORS.fullmatch, flags))]
    return f"{name} ({', '.join(numbers)})" if numbers else name, " ".join(instructions)
