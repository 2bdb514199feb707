"""Everything that is to be measured on a GPU: exactness, bits, and time beside the peers.

    make gpu                                  the whole job
    python -m experiments.gpu --part layers --dtype f32
                                              some of it; the rest stays as it was measured
    python -m experiments.gpu --quick         under 30 seconds
    python -m experiments.gpu --device cpu    a rehearsal without a GPU: nothing on speed

bits        the same bits over 100 runs, forward and backward
accuracy    the accuracy suite, compiled, for every implementation of both layers
agreement   whether all that is timed computes the same
train       the training step of a network in the manner of ResNet-50, with each layer in JAX
layer_norm  the time of layer norm on [8192, 768] to [8192, 16384]
layers      the time of batch norm + ReLU on the arrays of a ResNet-50, at batches of 32 and
            256, channels first and last

Timed are this layer by each of its implementations, Equinox's, Flax's, and PyTorch's: eager
and, from 100 MB on, compiled; contiguous and channels last. All are in one process, in turns. A
program has several instances of a layer, each with arrays of its own, so that neither the
host's calls nor the cache of the device are what is measured: see gpu_run_job.py and
gpu_run_timing.py. In float32 and bfloat16.

Times are medians over rounds, with quartiles. Beside them stands what share of the bandwidth
of a copy, measured here and now, they come to with the least that has to move: of batch norm 3
times the bytes of x forward, 8 with the backward pass; of layer norm, whose rows can be held, 2
and 5.

A contender that raises is a row that says so, and the others go on. Results are written after
each step. It exits with 1 where a claim does not hold or something failed.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence

from . import (
    command,
    gpu_run_claims,
    gpu_run_contenders,
    gpu_run_device,
    gpu_run_figure,
    gpu_run_parts,
    gpu_run_tables,
)
from .gpu_run_job import QUICK, REHEARSAL, WHOLE, Job
from .gpu_run_rows import PARTS, Files


def parser() -> argparse.ArgumentParser:
    made = command.parser(
        "gpu",
        __doc__,
        quick="a few arrays, in bfloat16; no torch.compile",
        whole="the whole job on a GPU",
    )
    made.add_argument(
        "--device",
        choices=("gpu", "cpu"),
        default="gpu",
        help="cpu: a rehearsal of all of it with small arrays, without a word on speed",
    )
    made.add_argument(
        "--part",
        nargs="+",
        choices=PARTS,
        metavar="PART",
        help=f"only these of {', '.join(PARTS)}; what DIR/results has of the others is kept, "
        "if it was measured with the same versions on the same device",
    )
    made.add_argument(
        "--dtype", choices=WHOLE.dtypes, help="only this; what there is of the other is kept"
    )
    made.add_argument(
        "--without",
        nargs="+",
        choices=tuple(gpu_run_contenders.OPTIONAL),
        default=[],
        metavar="PEER",
        help=f"leave out these of {', '.join(gpu_run_contenders.OPTIONAL)}",
    )
    return made


def job(options: argparse.Namespace) -> Job:
    jobs = {"cpu": REHEARSAL, "gpu": QUICK if options.quick else WHOLE}
    chosen = jobs[options.device]
    return dataclasses.replace(chosen, dtypes=(options.dtype,)) if options.dtype else chosen


def whole(options: argparse.Namespace) -> bool:
    """Returns whether this is everything there is to measure, with every peer that is there."""
    return job(options) == WHOLE and not options.part and not options.without


def main(arguments: Sequence[str] | None = None) -> int:
    started = time.perf_counter()
    options = parser().parse_args(arguments)
    why_not = gpu_run_device.why_not(options.device)
    if why_not is not None:
        parser().exit(2, f"{why_not}\n")
    gpu, chosen = options.device == "gpu", job(options)
    folder = command.folder(parser(), options, whole=whole(options))
    left_out = gpu_run_contenders.left_out(
        options.without, gpu=gpu, torch_compile=chosen.torch_compile
    )
    for name, why in left_out.items():
        print(f"{name} is left out: {why}")
    about = {"environment": gpu_run_device.environment(), "job": chosen.name}
    files = Files(folder, gpu_run_device.stem(), about)
    # In the order of the job, whatever the order they were asked for in.
    parts = [part for part in PARTS if part in (options.part or PARTS)]
    rows, seconds = gpu_run_parts.run(chosen, parts, files, left_out, gpu=gpu)
    verdicts = gpu_run_claims.judge(rows, gpu=gpu)
    files.describe(left_out, seconds, verdicts)
    figures = gpu_run_figure.draw(folder, files.csv.stem)
    print(f"\n{gpu_run_tables.report(rows, verdicts, gpu=gpu)}\n")
    taken = round(time.perf_counter() - started, 1)
    print(f"in {taken} s; results in {files.csv}, figures:", *figures)
    return int(any(verdict.holds is False for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
