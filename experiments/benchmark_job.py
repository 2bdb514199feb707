"""What the benchmark is to measure, and where it puts what it measured."""

import dataclasses
import re

import jax

from .benchmark_layers import EQUINOX, FLAX, INVARIANT, OURS
from .benchmark_runs import Shape

MEASURED = ("time", "compile", "stack", "growth")


@dataclasses.dataclass(frozen=True)
class Job:
    """What to measure. The defaults are the whole job."""

    # [N, C, *spatial]: large and square, many channels, few channels, late in a ResNet at a
    # batch of 8, two without spatial axes, and one with one long one.
    shapes: tuple[Shape, ...] = (
        (64, 64, 32, 32),
        (256, 256, 8, 8),
        (32, 16, 112, 112),
        (16, 32, 4096),
        (8, 512, 7, 7),
        (1024, 128),
        (64, 512),
    )
    dtypes: tuple[str, ...] = ("f32", "bf16")
    contestants: tuple[str, ...] = (OURS, INVARIANT, *EQUINOX, *FLAX, "torch")
    rounds: int = 20
    measured: tuple[str, ...] = MEASURED
    # Of a compilation, the median of so many.
    compilations: int = 3
    memory: str = "system"
    stack: Shape = (32, 32, 8, 8)
    depth: int = 50
    # N of [N, 64, 16, 16]: 2^14 to 2^26 values, and others between them.
    growth: tuple[int, ...] = (*(2**i for i in range(13)), *(3**i for i in range(1, 8)))


# What does not depend on the machine: results, and temporaries from 1 MiB on. (Of smaller
# arrays the first level of the sums is a larger part.)
QUICK = Job(
    shapes=((16, 64, 32, 32), (64, 128, 8, 8)),
    dtypes=("f32",),
    contestants=(OURS, *EQUINOX),
    rounds=3,
    measured=("time", "compile"),
    compilations=1,
)


def stem(job: Job) -> str:
    """Results of a GPU are kept beside those of a CPU."""
    device = jax.devices()[0]
    kind = "" if device.platform == "cpu" else device.device_kind
    words = (kind, "kept memory" if job.memory == "kept" else "")
    names = (re.sub(r"[^a-z0-9]+", "-", word.lower()).strip("-") for word in words)
    return "_".join(["benchmark", *filter(None, names)])


def whole(job: Job) -> bool:
    """Returns whether the job is the whole one, with every contestant that can be here."""
    every = dataclasses.replace(Job(), rounds=max(job.rounds, Job().rounds), memory=job.memory)
    if jax.default_backend() != "cpu":  # torch has a GPU only if it is installed for one
        every = dataclasses.replace(every, contestants=job.contestants)
    return job == every
