"""Writing results: small text files that say what they were measured with."""

import csv
import json
import os
import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from . import processor

FOLDER = Path(__file__).parent / "results"


def environment(*packages: str) -> dict[str, Any]:
    """Returns device, processor, interpreter and versions; nothing that identifies a machine.

    For the .json beside the results, which nothing compares: processors round differently.
    """
    device = jax.devices()[0]
    return {
        "device": f"{device.platform}: {device.device_kind}",
        "processor": processor.model(),
        "instruction set": processor.instruction_set(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("jax", "jaxlib", "equinox", "numpy", *packages)},
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns are aligned, for the terminal and the README alike."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        return f"| {' | '.join(padded)} |"

    return "\n".join([line(header), line(["-" * w for w in widths]), *map(line, rows)])
