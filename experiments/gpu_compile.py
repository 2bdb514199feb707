"""What a GPU would have to move: the layer, compiled for an H200 that is not there.

    make gpu-compile-check                     everything, in an environment of its own: 1 GB
    python -m experiments.gpu_compile          the same, where the CUDA plugin is installed
    python -m experiments.gpu_compile --quick  only what is asserted

Batch normalisation does little arithmetic; its time on a GPU is the time to move its arrays
between memory and processor. How much it moves can be read off the optimised program, which
XLA makes for a GPU from its description. The unit is the bytes of x. In training, the least is
2 reads and 1 write forward, 4 reads and 1 write backward: 8 units.

Two questions are answered, in bfloat16 and float32:

1. How many units do norm and ReLU move, state update included, forward and with the gradients
   of x, weight and bias? For this layer at most 9.1, on dense and on convolutional input.
   Where y and its cotangent are known at once, XLA writes y in the pass that makes the sums of
   the backward pass, which saves a read of x. In training the cotangent comes later: "forward,
   then backward" keeps the two apart.
2. Between two convolutions, which XLA gives another memory layout than the caller does, does
   the layer force arrays back into the caller's layout? There must be no more copies and
   transposes of the size of x than without the layer.

"eqx_norm" is what XLA makes of the layer, "eqx_norm, kernel" the layer with the kernels of
implementation="pallas_triton". They read columns: an x of convolutional shape in the caller's
layout, with no convolution before it, XLA first writes out in theirs.

It exits with 1 where an answer is not as stated. Nothing runs, so nothing is timed.
"""

import csv
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from . import command, gpu_compiler, gpu_targets, results
from .gpu_measure import HOLDS, MOST_UNITS, Row, run
from .gpu_programs import BOTH, KERNEL, NO_NORM, OURS

TARGET = "NVIDIA H200 (compiled for, not run on)"
PLUGIN = ("jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12")


def report(rows: Sequence[Row]) -> str:
    return results.table(
        (
            "program",
            "dtype",
            "direction",
            "implementation",
            "units of x",
            "layout changes",
            "verdict",
        ),
        [
            (
                row.program,
                row.dtype,
                row.direction,
                row.implementation,
                row.failure if row.units is None else f"{row.units:.2f}",
                "" if row.layout_changes is None else str(row.layout_changes),
                row.verdict.upper() if row.problem else row.verdict,
            )
            for row in rows
        ],
    )


def summary(path: Path) -> str:
    """The table of the README, from the committed results: forward + backward."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["direction"] == BOTH]
    shown = {
        NO_NORM: "no norm",
        OURS: "eqx-norm, XLA",
        KERNEL: "with kernels",
        "equinox, batch": "Equinox, batch",
    }
    units = {
        (row["program"], row["dtype"], row["implementation"]): f"{float(row['units']):.1f}"
        for row in rows
        if row["units"]
    }
    programs = dict.fromkeys((row["program"], row["dtype"]) for row in rows)
    return results.table(
        ("compiled for an H200", "dtype", *(f"units of x, {name}" for name in shown.values())),
        [(*key, *(units.get((*key, name), "-") for name in shown)) for key in programs],
    )


def save(folder: Path, rows: Sequence[Row], seconds: float) -> None:
    header = [field.name for field in dataclasses.fields(Row)]
    cells = [dataclasses.asdict(row) for row in rows]
    for row in cells:
        row["shape"] = "x".join(map(str, row["shape"]))
        row["units"] = "" if row["units"] is None else f"{row['units']:.4f}"
    results.write_csv(
        folder / "gpu_compile.csv", header, [[row[name] for name in header] for row in cells]
    )
    environment = {**results.environment(*PLUGIN), "device": TARGET}
    results.write_json(
        folder / "gpu_compile.json",
        {
            "environment": environment,
            "most_units": MOST_UNITS,
            "problems": sum(row.problem for row in rows),
            "seconds": seconds,
        },
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser(
        "gpu_compile",
        __doc__,
        quick="only this layer, forward and backward",
        whole="the whole job",
        writes="DIR/results",
    )
    options = parser.parse_args(arguments)
    gpu_compiler.require_plugin(parser)
    folder = command.folder(parser, options, whole=not options.quick) / "results"
    started = time.perf_counter()
    rows = run(gpu_compiler.compiler(gpu_targets.H200), options.quick)
    seconds = round(time.perf_counter() - started, 1)
    save(folder, rows, seconds)
    problems = sum(row.problem for row in rows)
    print(report(rows))
    print(f"\n{TARGET}; {problems} not {HOLDS}; in {seconds} s; results in {folder}")
    return int(problems > 0)


if __name__ == "__main__":
    sys.exit(main())
