"""The processor that results were measured on: by it trained numbers differ in their digits."""

import platform
import re
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
# What decides in which order and how rounded compiled code sums and multiplies.
_VECTORS = re.compile(r"sse4_2|avx.*|fma.*|f16c|amx.*|asimd.*|sve.*|sme(?!p).*|bf16|i8mm")


def model() -> str:
    """Returns its name; that of its architecture where the system has no `/proc/cpuinfo`."""
    about = _about()
    name = about.get("model name") or platform.processor() or platform.machine()
    numbers = [f"{key} {about[key]}" for key in ("cpu family", "model") if key in about]
    return f"{name} ({', '.join(numbers)})" if numbers else name


def instruction_set() -> str:
    """Returns its architecture, and which instructions on vectors and matrices it has."""
    about = _about()
    flags = (about.get("flags") or about.get("Features") or "").split()
    return " ".join([platform.machine(), *sorted(filter(_VECTORS.fullmatch, flags))])


def _about() -> dict[str, str]:
    """Returns what Linux says of the first core; nothing elsewhere."""
    try:
        first, *_ = _CPUINFO.read_text(encoding="utf-8").split("\n\n")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}
