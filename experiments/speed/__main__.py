"""Times batch norm and layer norm in training: this package's, and its peers'.

    python -m experiments.speed                  on a CPU: 22 minutes, 2 cores
    python -m experiments.speed --quick          under 30 seconds; fails if what does not depend
                                                 on the machine does not hold
    python -m experiments.speed --memory kept    on a CPU, see below
    python -m experiments.speed --device gpu     on a GPU; exits with 1 if a claim does not hold
    python -m experiments.speed --device rehearsal
                                                 what is done on a GPU, in small on a CPU
    python -m experiments.speed --only time --shapes 64,64,32,32 --dtype f32 --rounds 10

It times batch norm with its running statistics and a ReLU, layer norm, and the training step of
a network in the manner of ResNet-50: forward, and forward and backward (the gradients of x,
weight and bias for a given dy). First it checks that all that is timed computes the same. In
every round each peer runs once, in an order drawn anew, so that what else the machine does
falls on all of them alike. Compare the numbers of one run with each other, not with those of
another. All the same, leave the machine alone meanwhile: where something else takes a core,
PyTorch's threads wait for each other for up to 90 ms, and nobody else's do.

On a CPU the arrays are those that every norm of a ResNet-50, a MobileNetV2 and a ConvNeXt-T is
given at a batch of 32, those of perceptrons, and two of odd sizes. Each is timed hot, where a
program repeats, and cold, where nothing of its arrays is in a cache, as in a network. This
layer takes part with its ReLU inside (activation=) and after it, which is what a change of
import gives. In inference the memory is that of one batch.

Beside them stand a copy of x in memory, and the five passes over x that batch norm cannot do
without, one by one: the sum of its parts. It counts the temporaries of programs and the bytes
that networks of pre-activation blocks move, and measures how the cost grows with the size of
x, and the processor's time to compile a layer and whole networks. Where an array is large, the
system, which hands out its memory, takes a good part of the time: most from those with
temporaries, and another in every run. With `--memory kept` the process keeps what it frees,
and the times are those of the arithmetic.

On a GPU the arrays are those of a ResNet-50 at batches of 32 and 256, channels first and last,
and rows of 768 to 16384 values, several instances of each, so that neither the host's calls nor
the cache of the device are what is measured. Beside each time stands the share of a copy's
bandwidth that it comes to with the least that has to move. PyTorch runs eagerly and, from
100 MB on, compiled. The bits of 100 runs are compared before anything is timed.

Results are written after each step. Where a peer raises, its row says so, and the others go on.
Flax and PyTorch take part where they are installed: in .venv-peers, which `make test-peers`
makes.
"""

import argparse
import dataclasses
import os
import sys

import jax

from experiments.lab import peers, timer
from experiments.lab.environment import device_name
from experiments.lab.errors import UserError
from experiments.lab.experiment import Experiment, number_from, with_options

from . import cases
from .cases import (
    JOBS,
    PARTS,
    PEERS,
    Job,
    Shape,
)
from .figures import draw
from .measure import measure
from .tables import report

NO_GPU = (
    "--device gpu: JAX finds none here ({found}). Run it on a machine that has one, in an "
    "environment with jax[cuda13] or jax[cuda12] (make gpu sets it up); or rehearse all of it "
    "here, with small arrays and no word on speed: --device rehearsal"
)


def _shape(text: str) -> Shape:
    try:
        shape = tuple(int(size) for size in text.replace("x", ",").split(","))
    except ValueError:
        shape = ()
    if len(shape) < 2 or min(shape) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r}: must be N,C,*spatial, of 1 or more, for example 64,64,32,32"
        )
    return shape


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--device", choices=tuple(JOBS), default="cpu", help="where to measure (default: cpu)")
    add("--shapes", nargs="+", type=_shape, metavar="N,C,...", help="of a batch norm's x")
    add("--dtype", dest="dtypes", nargs="+", choices=tuple(cases.DTYPES), help="of x, y and dy")
    among = f"only these: {', '.join(map(repr, PEERS))}"
    add("--peers", "--contestants", nargs="+", choices=PEERS, metavar="NAME", help=among)
    add("--rounds", type=number_from(1), metavar="N", help="timings of each program")
    about = "; ".join(f"{part}: {what}" for part, what in PARTS.items())
    add(
        "--only",
        dest="parts",
        nargs="+",
        choices=tuple(PARTS),
        metavar="PART",
        help=f"only these. {about}",
    )
    add(
        "--memory",
        choices=("system", "kept"),
        default="system",
        help="system: freed arrays go where the C library sends them (default); kept: they "
        "stay with the process (glibc only)",
    )


def choose(job: Job, options: argparse.Namespace) -> Job:
    """Returns what was asked for. Has to be called before JAX finds its devices."""
    # First of all: once JAX runs, its threads have their memory from elsewhere.
    if options.memory == "kept" and not timer.keep_memory():
        raise UserError("--memory kept: this needs the GNU C library")
    jax.config.update("jax_enable_compilation_cache", False)  # compiling is timed
    if options.device == "gpu":
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")  # the rest is torch's
        try:
            found = jax.devices()[0].platform
        except RuntimeError as error:  # a plugin without a driver
            found = str(error).partition("\n")[0]
        if found != "gpu":
            raise UserError(NO_GPU.format(found=found))
    else:
        jax.config.update("jax_platforms", "cpu")
    whole, quick = JOBS[options.device]
    job = with_options(quick if options.quick else whole, options)
    # Of shapes that were named none is left out of anything.
    return dataclasses.replace(job, every=1) if options.shapes else job


def present(job: Job) -> tuple[Job, dict[str, str]]:
    """Returns the job with the peers that can run here, and why the others cannot."""
    kept, left_out = peers.present(job.peers)
    return dataclasses.replace(job, peers=kept), left_out


def is_whole(job: Job) -> bool:
    """Returns whether the job is the whole one; on a GPU with every peer that is there."""
    whole = JOBS[job.device][0]
    if job.device == "gpu":  # torch may be left out of its environment
        whole, _ = present(whole)
    return job.device != "rehearsal" and job == dataclasses.replace(whole, memory=job.memory)


def stem(job: Job) -> str:
    """Returns the stem of its files: results of a GPU are kept beside those of a CPU."""
    device = {"cpu": "", "rehearsal": "rehearsal"}.get(job.device, device_name())
    words = ("speed", device, "kept-memory" if job.memory == "kept" else "")
    return "_".join(filter(None, words))


EXPERIMENT = Experiment(
    name="speed",
    about=__doc__,
    thread="speed, `make benchmark`",
    whole=Job(),
    quick=cases.QUICK,
    measure=measure,
    report=report,
    draw=draw,
    add_arguments=add_arguments,
    choose=choose,
    present=present,
    is_whole=is_whole,
    stem=stem,
    strict=lambda job: job.device != "cpu",
)

if __name__ == "__main__":
    sys.exit(EXPERIMENT.main())
