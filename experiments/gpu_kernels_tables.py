"""What was read off the compiled kernels: tables, files, and which claims do not hold."""

import csv
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import results
from .gpu_kernels_measure import MOST, Kernel, Program
from .gpu_targets import TARGETS

PLUGIN = ("jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12")
# What the README shows.
SHOWN = ("H200", "bfloat16")


def report(rows: Sequence[Kernel], programs: Sequence[Program]) -> str:
    """The kernels on an H200, and all programs that are not as claimed."""
    kernels = results.table(
        ("kernel", "by", "x", "dtype", "tile", "registers", "occupancy", "units", "of least"),
        [
            (
                row.kernel,
                row.implementation,
                row.shape,
                row.dtype,
                f"{row.chunk} x {row.tile}",
                str(row.registers),
                f"{row.occupancy:.0%}",
                f"{row.units:.3f}",
                "" if row.least_share is None else f"{row.least_share:.1%}",
            )
            for row in rows
            if row.device == "H200" and not row.kernel.startswith("merge")
        ],
    )
    moved = results.table(
        ("program", "device", "x", "dtype", "by", "units", "launches", "layout changes"),
        [
            (
                program.program,
                program.device,
                program.shape,
                program.dtype,
                program.implementation,
                f"{program.units:.3f}",
                str(program.launches),
                str(program.layout_changes),
            )
            for program in programs
            if program.device == "H200" or program.problem
        ],
    )
    return f"{kernels}\n\n{moved}"


def summary(path: Path) -> str:
    """For the README: the kernels in bfloat16 on an H200, as `save` has written them."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if (row["device"], row["dtype"]) == SHOWN]
    return results.table(
        (
            "kernel",
            "by",
            "x",
            "tiles",
            "registers",
            "shared memory",
            "occupancy",
            "units of x",
            "least",
        ),
        [
            (
                row["kernel"],
                row["implementation"].removeprefix("pallas_").capitalize(),
                row["shape"],
                f"{row['chunk']} x {row['tile']}",
                row["registers"],
                f"{row['shared_bytes']} B",
                f"{float(row['occupancy']):.0%}",
                f"{float(row['units']):.2f}",
                f"{float(row['least_share']):.0%}",
            )
            for row in rows
            if row["least_share"]
        ],
    )


def claims(rows: Sequence[Kernel], programs: Sequence[Program]) -> dict[str, list[str]]:
    """What does not hold of each claim: empty where it does."""

    def of(problem: str) -> list[str]:
        return [
            f"{row.device} {row.shape} {row.dtype} {row.implementation} "
            f"{row.kernel if isinstance(row, Kernel) else row.program}"
            for row in (*rows, *programs)
            if problem in row.problem
        ]

    return {
        "nothing is spilled": of("spills"),
        "nothing is added atomically": of("atomics"),
        "Triton's kernels load x and g 16 bytes at a time": of("loads"),
        "Mosaic's kernels have x and g copied ahead": of("no copies"),
        "nothing is copied to where it is still read": of("unfenced"),
        "at most 3.05 units forward and 5.05 backward": of("more than"),
        "no layout changes between convolutions": of("adds"),
    }


def save(
    folder: Path, rows: Sequence[Kernel], programs: Sequence[Program], seconds: float
) -> None:
    for name, kind, table in (
        ("gpu_kernels.csv", Kernel, rows),
        ("gpu_kernels_programs.csv", Program, programs),
    ):
        header = [field.name for field in dataclasses.fields(kind)]
        lines = [[_cell(getattr(row, name)) for name in header] for row in table]
        results.write_csv(folder / name, header, lines)
    results.write_json(
        folder / "gpu_kernels.json",
        {
            "environment": {
                **results.environment(*PLUGIN),
                "device": "compiled for, not run on: " + ", ".join(TARGETS),
            },
            "most_units": MOST,
            "does_not_hold": claims(rows, programs),
            "seconds": seconds,
        },
    )


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    return f"{value:.4f}" if isinstance(value, float) else value
