"""What the benchmark can be asked for on the command line."""

import argparse
import dataclasses

from . import benchmark_layers, benchmark_runs, benchmark_timing, command
from .benchmark_job import MEASURED, QUICK, Job
from .benchmark_runs import Shape


def parser(description: str | None) -> argparse.ArgumentParser:
    made = command.parser(
        "benchmark",
        description,
        quick="two shapes in f32, without Flax and torch; exits with 1 if the results "
        "differ by more than 1e-4 or this layer needs temporaries of more than 0.1 of x",
        whole="the whole job with every contestant",
    )
    whole = Job()
    add = made.add_argument
    add(
        "--shapes",
        nargs="+",
        type=_shape,
        metavar="N,C,...",
        help="of x: batch, channels, spatial axes "
        f"(default: {' '.join(','.join(map(str, shape)) for shape in whole.shapes)})",
    )
    add(
        "--dtype",
        nargs="+",
        choices=tuple(benchmark_layers.DTYPES),
        help="of x, y and dy; weights and statistics are f32 (default: both)",
    )
    add(
        "--contestants",
        nargs="+",
        choices=whole.contestants,
        metavar="NAME",
        help="only these: " + ", ".join(f"'{name}'" for name in whole.contestants),
    )
    add(
        "--rounds",
        type=_natural,
        metavar="N",
        help=f"timings of each program, after {benchmark_timing.WARM_UPS} that do not count "
        f"(default: {whole.rounds})",
    )
    add(
        "--only",
        nargs="+",
        choices=MEASURED,
        metavar="PART",
        help="only these parts: time; compile (temporaries and time to compile, per shape); "
        f"stack (time to compile {whole.depth} layers); growth (time over size, with "
        "results written over those of the call before)",
    )
    add(
        "--memory",
        choices=("system", "kept"),
        default=whole.memory,
        help="system: freed arrays go where the C library sends them (default); kept: they "
        "stay with the process (glibc only)",
    )
    return made


def _shape(text: str) -> Shape:
    try:
        shape = benchmark_runs.shape_of(text)
    except ValueError:
        shape = ()
    if len(shape) < 2 or min(shape) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r}: must be N,C,*spatial, of 1 or more, for example 64,64,32,32"
        )
    return shape


def _natural(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be 1 or more")
    return value


def job(options: argparse.Namespace) -> Job:
    """What the parsed arguments ask for."""
    base = QUICK if options.quick else Job()
    return dataclasses.replace(
        base,
        shapes=tuple(dict.fromkeys(options.shapes or base.shapes)),
        dtypes=tuple(dict.fromkeys(options.dtype or base.dtypes)),
        contestants=tuple(dict.fromkeys(options.contestants or base.contestants)),
        rounds=options.rounds or base.rounds,
        memory=options.memory,
        measured=tuple(dict.fromkeys(options.only or base.measured)),
    )
