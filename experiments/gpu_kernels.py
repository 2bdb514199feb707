"""The Pallas kernels, compiled for an A100, an H200 and a B200 that are not there.

    make gpu-compile-check                     everything, in an environment of its own: 1 GB
    python -m experiments.gpu_kernels          the same, where jax's CUDA plugin is installed
    python -m experiments.gpu_kernels --quick  two shapes on an H200

Claimed of every kernel, of Triton's and Mosaic's, for every shape and dtype below:

1. Nothing is spilled: what a thread works on stays in its registers.
2. Nothing is added atomically, so that sums are the same in every run.
3. Triton's load x and g 16 bytes at a time, where their rows are multiples of that.
4. Mosaic's have x and g copied ahead to shared memory,
5. and nothing is copied to where it might still be read.
6. A normalisation with ReLU moves at most 3.05 times the bytes of x forward and 5.05 times
   backward, where 3 and 5 are the least for two passes.

And between two convolutions, where arrays have a layout that is XLA's own:

7. The kernels do not have x written out again in theirs. (Not claimed of float32 on an A100,
   where XLA leaves it in the caller's layout.)

It exits with 1 where a claim does not hold. Nothing runs, so nothing is timed.
"""

import itertools
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tqdm import tqdm

from . import command, gpu_compiler, gpu_kernels_code, gpu_kernels_measure, gpu_kernels_tables
from .gpu_kernels_measure import MOST, Compile, Kernel, Program
from .gpu_targets import TARGETS

# (*ensemble, examples, channels, values). In columns, as convolutions have them on a GPU: of
# layers of a ResNet-50, and of 256, 200 and 33 channels. In rows: long ones; and images.
SHAPES = [
    (65536, 256, 1),
    (802816, 64, 1),
    (6272, 1024, 1),
    (1568, 2048, 1),
    (65521, 200, 1),
    (65521, 33, 1),
    (8192, 1, 1, 16384),
    (64, 1, 1, 1000000),
    (32, 3, 50176),
]
QUICK = [SHAPES[0], SHAPES[5]]
# (examples, 1, values): of LayerNorm, where a program holds a row.
ROWS = [(8192, 1, values) for values in (768, 1000, 4096)]
DTYPES = ("bfloat16", "float32", "float16")


def run(compile_: Compile, device: str, quick: bool) -> tuple[list[Kernel], list[Program]]:
    dtypes = DTYPES[:1] if quick else DTYPES
    rows: list[Kernel] = []
    programs: list[Program] = []
    jobs = [
        (shape, dtype, direction, implementation)
        for shape, dtype in itertools.product(QUICK if quick else SHAPES, dtypes)
        for direction in MOST
        for implementation in gpu_kernels_measure.implementations(device, shape, dtype)
    ]
    for job in tqdm(jobs, disable=None, desc=f"{device}, sums"):
        found, program = gpu_kernels_measure.measure(compile_, device, *job)
        rows += found
        programs.append(program)
    jobs = list(itertools.product(ROWS[:1] if quick else ROWS, dtypes, MOST))
    for job in tqdm(jobs, disable=None, desc=f"{device}, rows"):
        found, program = gpu_kernels_measure.measure_rows(compile_, device, *job)
        rows += found
        programs.append(program)
    for dtype in dtypes[:2]:
        programs += gpu_kernels_measure.measure_between(compile_, device, dtype)
    return rows, programs


def compiled(device: str, quick: bool) -> tuple[list[Kernel], list[Program]]:
    with tempfile.TemporaryDirectory() as written:
        os.environ |= gpu_kernels_code.settings(Path(written))
        compile_ = gpu_kernels_measure.compiler(device, Path(written))
        return run(compile_, device, quick)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser(
        "gpu_kernels",
        __doc__,
        quick="two shapes on an H200, bfloat16",
        whole="the whole job",
        writes="DIR/results",
    )
    options = parser.parse_args(arguments)
    gpu_compiler.require_plugin(parser)
    folder = command.folder(parser, options, whole=not options.quick) / "results"
    started = time.perf_counter()
    devices = ["H200"] if options.quick else list(TARGETS)
    rows: list[Kernel] = []
    programs: list[Program] = []
    # Each in a process of its own: jaxlib does not compile a Mosaic kernel again for another
    # device (0.12.0).
    alone = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=alone, max_tasks_per_child=1) as pool:
        for found, theirs in pool.map(compiled, devices, itertools.repeat(options.quick)):
            rows += found
            programs += theirs
    seconds = round(time.perf_counter() - started, 1)
    gpu_kernels_tables.save(folder, rows, programs, seconds)
    print(gpu_kernels_tables.report(rows, programs))
    wrong = gpu_kernels_tables.claims(rows, programs)
    for claim, where in wrong.items():
        print(f"{'DOES NOT HOLD' if where else 'holds'}: {claim}", *where, sep="\n    ")
    print(
        f"{len(rows)} kernels in {len(programs)} programs; in {seconds} s; results in {folder}"
    )
    return int(any(wrong.values()))


if __name__ == "__main__":
    sys.exit(main())
