"""Compiles the layers for GPUs that are not there, and counts what their programs move.

    make gpu-compile-check                  everything, in an environment of its own: 1 GB
    python -m experiments.compiled          the same, where jax's CUDA plugin is installed
    python -m experiments.compiled --quick  a few shapes on an H200

Batch normalisation does little arithmetic; its time on a GPU is the time to move its arrays
between memory and processor. How much it moves can be read off the optimised program, which
XLA makes for a GPU from its description. The unit is the bytes of x. In training, the least is
2 reads and 1 write forward, 4 reads and 1 write backward: 8 units.

programs   how many units a norm and its activation move, state update included, by XLA and with
           this package's kernel; Equinox's beside them. "forward + backward" is where y and
           its cotangent are known at once: XLA then writes y in the pass that makes the sums of
           the backward pass, and saves a read of x. In training the cotangent comes later:
           "forward, then backward". And between two convolutions, which XLA gives another
           memory layout than the caller: how often an array of the size of x is copied or
           transposed, with a layer and without.
kernels    what becomes of the kernel, and of the one that merges its results, on an H200 and a
           B200: registers, spills, atomic additions, copies ahead to shared memory.
devices    what a step sends between 8 GPUs, by `jit` and in `shard_map`, masked or not.
memory     what a ResNet-50's step keeps for the backward pass, with `recompute_outputs` and
           without: by JAX, and what XLA makes of it; and the processor's time to lower and
           compile it.
recipe     whether `eqx_norm.determinism.deterministic` has scatters sorted, which on a GPU add
           atomically otherwise, and leaves the programs of this package as they are.

The kernel reads columns: an x of convolutional shape in the caller's layout, with no
convolution before it, XLA first writes out in its own.

Nothing runs, so no program is timed.
"""

import importlib.util
import itertools
import multiprocessing
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax

from experiments.lab import claims as lab_claims
from experiments.lab import rows
from experiments.lab.environment import environment
from experiments.lab.errors import UserError
from experiments.lab.experiment import Experiment, Files, Report
from experiments.lab.passes import BOTH, NO_NORM
from experiments.lab.peers import names
from experiments.lab.tables import listing, table

from . import compiler, devices, measured, memory, recipe
from .cases import BATCH_NORM, DENSE
from .claims import CLAIMS, Measured
from .measured import Kernel, Program

# Packages whose versions decide what is compiled, and which nobody imports.
PLUGIN = ("jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12")


@dataclass(frozen=True)
class Job:
    """What to compile."""

    devices: tuple[str, ...] = compiler.DEVICES
    quick: bool = False  # fewer shapes, in bfloat16


def measure(job: Job, files: Files) -> dict[str, Any]:
    if importlib.util.find_spec("jax_cuda12_plugin") is None:
        raise UserError(
            "To compile for a GPU takes jax's CUDA plugin, which is not installed here: "
            "make gpu-compile-check sets up an environment that has it (no GPU needed)."
        )
    # With the plugin installed jax would look for a GPU, and fail where there is none.
    jax.config.update("jax_platforms", "cpu")
    # Each in a process of its own: the recipe is for all of a process, and jaxlib does not
    # compile a Mosaic kernel again for another device (0.12.0).
    alone = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=alone, max_tasks_per_child=1) as pool:
        needed = pool.submit(memory.compiled, job.quick)
        sent = pool.submit(devices.compiled)
        texts = [pool.submit(recipe.compiled, by_it) for by_it in (False, True)]
        found = list(pool.map(measured.compiled, job.devices, itertools.repeat(job.quick)))
        steps = recipe.compare(*(text.result() for text in texts))
    programs, kernels = (itertools.chain(*rows) for rows in zip(*found, strict=True))
    rows.save(files.csv("_programs"), Program, programs)
    rows.save(files.csv("_kernels"), Kernel, kernels)
    rows.save(files.csv("_recipe"), recipe.Step, steps)
    rows.save(files.csv("_devices"), devices.Sent, sent.result())
    rows.save(files.csv("_memory"), memory.Needed, needed.result())
    compiled_for = f"compiled for, not run on: {', '.join(job.devices)}"
    return {"environment": {**environment(*PLUGIN), "device": compiled_for}}


def report(files: Files) -> Report:
    read = Measured(
        rows.load(files.csv("_programs"), Program),
        rows.load(files.csv("_kernels"), Kernel),
        rows.load(files.csv("_recipe"), recipe.Step),
        rows.load(files.csv("_devices"), devices.Sent),
        rows.load(files.csv("_memory"), memory.Needed),
    )
    verdicts = lab_claims.judge(CLAIMS, read)
    tables = [
        lab_claims.verdicts_table(verdicts),
        _beside(read.programs),
        _kernels(read.kernels),
        _steps(read.steps),
        listing(read.sent, SENT),
        _needed(read.needed),
    ]
    return Report(
        "\n\n".join(tables),
        verdicts,
        ours=_units(read.programs, names.OURS_XLA),
        peers=_units(read.programs, names.EQUINOX_BATCH),
    )


def _units(programs: Iterable[Program], name: str) -> str:
    """Returns what batch norm + ReLU moves on dense arrays, with the backward pass."""
    wanted = ("H200", BATCH_NORM, DENSE, "bfloat16", BOTH, name)
    for row in programs:
        if row[: len(wanted)] == wanted and row.units is not None:
            return f"{name}: {row.units:.1f} times the bytes of x"
    return ""


def _beside(programs: Iterable[Program]) -> str:
    """Returns the units of x with the backward pass, layer beside layer."""
    shown = (NO_NORM, names.OURS_XLA, names.OURS_PALLAS, names.EQUINOX_BATCH)
    units: dict[tuple[str, str], dict[str, str]] = {}
    for row in programs:
        if (row.device, row.direction) == ("H200", BOTH) and row.units is not None:
            line = units.setdefault((f"{row.program}, {_by(row.shape)}", row.dtype), {})
            line[row.implementation] = f"{row.units:.1f}"
    return table(
        ("compiled for an H200", "dtype", *(f"units of x, {name}" for name in shown)),
        [(*line, *(by.get(name, "-") for name in shown)) for line, by in units.items()],
    )


def _kernels(kernels: Iterable[Kernel]) -> str:
    """Returns the code of the kernels, for an H200 and in half precision."""
    return table(
        ("kernel", "x", "dtype", "registers", "shared memory", "occupancy", "units of x"),
        [
            (
                *(row.kernel, _by(row.shape), row.dtype),
                *(row.registers, f"{row.shared_bytes} B"),
                *(f"{row.occupancy:.0%}", f"{row.units:.3f}"),
            )
            for row in kernels
            if (row.device, row.dtype) == ("H200", "bfloat16")
        ],
    )


def _steps(steps: Iterable[recipe.Step]) -> str:
    return table(
        ("for an H200", "usual", "the recipe", "the two programs"),
        [(*step[:3], "are the same" if step.same else "differ") for step in steps],
    )


def _needed(needed: Iterable[memory.Needed]) -> str:
    """Returns bytes and seconds of a step, and as shares of those of the layer alone."""
    alone = {(row.layer, row.dtype): row for row in needed if not row.recomputes}

    def cell(row: memory.Needed, field: str) -> str:
        value, whole = (getattr(r, field) for r in (row, alone[names.OURS, row.dtype]))
        amount = f"{value:.1f} s" if field == "seconds" else f"{value / 1e6:,.0f} MB"
        return f"{amount} ({value / whole:.2f})"

    fields = ("kept", "temporaries", "moved", "seconds")
    return table(
        ("a ResNet's step", "recompute_outputs", "dtype", *fields[:-1], "to lower and compile"),
        [
            (row.layer, row.recomputes, row.dtype, *(cell(row, field) for field in fields))
            for row in needed
        ],
    )


SENT = {
    f"over {devices.COUNT} of {devices.DEVICE}": "{way}",
    "layer": "{layer}",
    "dtype": "{dtype}",
    "mask": "{masked}",
    "collectives, and numbers that a device gets": "{collectives}",
}


def _by(sizes: Iterable[int]) -> str:
    return "x".join(map(str, sizes))


EXPERIMENT = Experiment(
    name="compiled",
    about=__doc__,
    thread="[a GPU that is not there](docs/gpu.md): what programs move",
    whole=Job(),
    quick=Job(devices=("H200",), quick=True),
    measure=measure,
    report=report,
)

if __name__ == "__main__":
    sys.exit(EXPERIMENT.main())
