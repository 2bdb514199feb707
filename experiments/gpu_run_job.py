"""What is to be measured on a GPU: the arrays of a ResNet-50, and rows as transformers have
them. All of it, a little of it, or the same in small on a CPU."""

import dataclasses
import math
from typing import NamedTuple

from . import accuracy_cases
from .accuracy_cases import Case
from .benchmark_layers import BOTH, DTYPES, Pass

Shape = tuple[int, ...]

BATCH_NORM, LAYER_NORM = "batch norm + ReLU", "layer norm"
# [N, C, H, W] as the user writes it; and [N * H * W, C], as convolutions on a GPU have it.
FIRST, LAST, ROWS = "channels first", "channels last", "rows"

# Channels and size of what the norms of a ResNet-50 are given.
RESNET_50 = (
    (64, 112, 112),
    (64, 56, 56),
    (256, 56, 56),
    (128, 28, 28),
    (512, 28, 28),
    (256, 14, 14),
    (1024, 14, 14),
    (512, 7, 7),
    (2048, 7, 7),
)
BATCHES = (32, 256)
IMAGES: tuple[Shape, ...] = tuple((n, *shape) for n in BATCHES for shape in RESNET_50)
WIDTHS: tuple[Shape, ...] = tuple(
    (8192, width) for width in (768, 1024, 2048, 4096, 8192, 16384)
)

# The least that has to move between memory and cores, in units of x. Of a channel nothing can
# be normalised before all of it is summed: x and x, y; then x and dy, x and dy, dx. A row of
# layer norm can be held meanwhile: x, y; then x and dy, dx. Vectors are next to nothing.
LEAST: dict[tuple[str, Pass], int] = {
    (BATCH_NORM, "forward"): 3,
    (BATCH_NORM, BOTH): 8,
    (LAYER_NORM, "forward"): 2,
    (LAYER_NORM, BOTH): 5,
}

# A program has so many instances of the layer, each with its own x, dy, y and dx, that it reads
# each array once in so many bytes of x: the 50 to 130 MB of an L2 hold none of them until the
# next call, and there is work for some hundred microseconds, more than a call takes to launch.
ONCE_IN = 250_000_000


class Sizes(NamedTuple):
    """Of the network that is trained, and of what it is given."""

    stem: int = 64
    stages: tuple[int, ...] = (64, 128, 256, 512)
    classes: int = 1000
    batch: int = 128
    image: int = 224


# Bytes of x, from which on the time is that of moving it, and little else.
LARGE = 100_000_000


@dataclasses.dataclass(frozen=True)
class Problem:
    kind: str
    shape: Shape  # [N, C, *spatial], or [rows, values]
    layout: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name} {self.dtype}, {self.layout}"

    @property
    def given(self) -> Shape:
        """The shape of x as a layer in JAX is given it."""
        if self.layout != LAST:
            return self.shape
        batch, channels, *spatial = self.shape
        return batch * math.prod(spatial), channels

    @property
    def name(self) -> str:
        return "x".join(map(str, self.shape))

    @property
    def bytes(self) -> int:
        """Of x."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def instances(self, most: int) -> int:
        return min(math.ceil(ONCE_IN / self.bytes), most)

    def least_bytes(self, pass_: Pass) -> int:
        return LEAST[self.kind, pass_] * self.bytes


def batch_norms(shapes: tuple[Shape, ...], dtypes: tuple[str, ...]) -> list[Problem]:
    return [
        Problem(BATCH_NORM, s, layout, d)
        for d in dtypes
        for s in shapes
        for layout in (FIRST, LAST)
    ]


def layer_norms(shapes: tuple[Shape, ...], dtypes: tuple[str, ...]) -> list[Problem]:
    return [Problem(LAYER_NORM, shape, ROWS, dtype) for dtype in dtypes for shape in shapes]


# One case for each of what is hard.
HARD = (
    "constants to 1000, n = 121",
    "mean/std = 1e3",
    "outlier first",
    "bfloat16, mean 100, std 1",
)


@dataclasses.dataclass(frozen=True)
class Job:
    name: str = "whole"
    images: tuple[Shape, ...] = tuple(reversed(IMAGES))  # large ones first
    widths: tuple[Shape, ...] = WIDTHS
    dtypes: tuple[str, ...] = tuple(DTYPES)
    rounds: int = 7
    least: float = 0.01  # seconds a timing
    most_instances: int = 24
    torch_compile: bool = True
    copied: int = 2**30  # bytes
    cases: tuple[Case, ...] = accuracy_cases.CASES
    runs: int = 100
    images_for_bits: tuple[Shape, ...] = ((64, 256, 56, 56), (256, 512, 7, 7))
    widths_for_bits: tuple[Shape, ...] = ((8192, 4096), (64, 100_000))
    network: Sizes = Sizes()

    @property
    def layers(self) -> list[Problem]:
        return batch_norms(self.images, self.dtypes)

    @property
    def layer_norm(self) -> list[Problem]:
        return layer_norms(self.widths, self.dtypes)

    @property
    def bits(self) -> list[Problem]:
        return [
            *batch_norms(self.images_for_bits, self.dtypes),
            *layer_norms(self.widths_for_bits, self.dtypes),
        ]

    @property
    def agreement(self) -> list[Problem]:
        return [
            *batch_norms(((8, 64, 14, 14),), self.dtypes),
            *layer_norms(((256, 768),), self.dtypes),
        ]


WHOLE = Job()
QUICK = Job(
    name="quick",
    images=((256, 256, 56, 56),),
    widths=((8192, 4096),),
    dtypes=("bf16",),
    rounds=5,
    torch_compile=False,  # takes seconds for each array
    cases=tuple(case for case in accuracy_cases.QUICK if case.name in HARD),
    runs=20,
    images_for_bits=((64, 256, 28, 28),),
    widths_for_bits=((8192, 4096),),
    network=Sizes(stages=(64,), batch=64, image=112),
)
REHEARSAL = dataclasses.replace(
    QUICK,
    name="rehearsal",
    images=((4, 8, 3, 5),),
    widths=((16, 24),),
    rounds=2,
    least=0.0,
    most_instances=2,
    copied=2**16,
    cases=QUICK.cases[:1],
    runs=3,
    images_for_bits=((4, 8, 3, 5),),
    widths_for_bits=((16, 24),),
    network=Sizes(4, (), 5, 2, 8),  # a block compiles for seconds
)
