"""Says what is timed: arrays, passes and peers, and a job for each device."""

import dataclasses
import math
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp

from experiments.lab.passes import BOTH as BOTH
from experiments.lab.passes import FORWARD as FORWARD
from experiments.lab.passes import NO_NORM as NO_NORM
from experiments.lab.peers import names

Shape = tuple[int, ...]
PASSES = (FORWARD, BOTH)

DTYPES = {"f32": jnp.dtype(jnp.float32), "bf16": jnp.dtype(jnp.bfloat16)}

# How x lies in memory. A batch norm is given [N, C, *spatial] in the layout that each peer is
# made for; or all of them the same: that, or [N * H * W, C], as convolutions on a GPU have it.
# A layer norm is given rows, [N, values].
OWN, FIRST, LAST, ROWS = "each its own", "channels first", "channels last", "rows"

# The parts of the experiment, in this order: first what a run that is cut short has to show.
PARTS = {
    "bits": "whether every run gives the same bits",
    "agreement": "whether all that is timed computes the same",
    "training": "the time of a network's training step",
    "layer_norm": "the time of a layer norm",
    "time": "the time of a batch norm with ReLU",
    "growth": "how that grows with the size of x",
    "compile": "temporaries of a batch norm with ReLU, and the time to compile it",
    "stack": "the time to compile many",
}
STEP = "training step"

# Kernels that have to be asked for by name, and may say that they cannot serve.
KERNELS = (names.OURS_TRITON, names.OURS_MOSAIC)
IN_TORCH = (names.TORCH, names.TORCH_COMPILED)
EQUINOX = (names.EQUINOX_EMA, names.EQUINOX_BATCH)
FLAX = (names.LINEN, names.NNX)
PEERS = (names.OURS, names.OURS_INVARIANT, names.OURS_XLA, *KERNELS)
PEERS = (*PEERS, *EQUINOX, names.EQUINOX, *FLAX, *IN_TORCH)

MIB = 2**20
# Bytes of x, from which on the time on a GPU is that of moving it, and little else.
LARGE = 100_000_000
# On a GPU a program has so many instances of the layer, each with its own x, dy, y and dx, that
# it reads each array once in so many bytes of x: the 50 to 130 MB of an L2 hold none of them
# until the next call, and there is work for some hundred microseconds, more than a call takes
# to launch.
ONCE_IN = 250_000_000
# The least that has to move between memory and cores, in units of x, by whether it is a layer
# norm. No value of a channel can be normalised before all are summed: x and x, y; then x and
# dy, x and dy, dx. A row can be held meanwhile: x, y; then x and dy, dx.
LEAST = {(False, FORWARD): 3, (False, BOTH): 8, (True, FORWARD): 2, (True, BOTH): 5}


class Problem(NamedTuple):
    """Says what a layer is given: a layer norm rows, a batch norm with ReLU any other array."""

    shape: Shape  # [N, C, *spatial], or [N, values]
    dtype: str
    layout: str

    @property
    def rows(self) -> bool:
        return self.layout == ROWS

    @property
    def bytes(self) -> int:
        """Returns the bytes of x."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class Shapes(NamedTuple):
    """Holds shapes of a batch norm's x, and of a layer norm's."""

    images: tuple[Shape, ...]
    rows: tuple[Shape, ...]


class Sizes(NamedTuple):
    """Says how large the network is that is trained, and what it is given."""

    stem: int = 64
    stages: tuple[int, ...] = (64, 128, 256, 512)
    classes: int = 1000
    batch: int = 128
    image: int = 224


@dataclass(frozen=True)
class Job:
    """Says what is measured. The defaults are the whole job on a CPU."""

    device: str = "cpu"  # "gpu"; "rehearsal": what is done on a GPU, on a CPU
    parts: tuple[str, ...] = tuple(part for part in PARTS if part != "bits")
    # A batch norm's x: large and square, many channels, few channels, one long spatial axis,
    # late in a ResNet at a batch of 8, and two without spatial axes.
    shapes: tuple[Shape, ...] = (
        *((64, 64, 32, 32), (256, 256, 8, 8), (32, 16, 112, 112), (16, 32, 4096)),
        *((8, 512, 7, 7), (1024, 128), (64, 512)),
    )
    layouts: tuple[str, ...] = (OWN,)
    rows: tuple[Shape, ...] = ((64, 512), (1024, 256), (4096, 768), (8192, 1024))
    dtypes: tuple[str, ...] = tuple(DTYPES)
    peers: tuple[str, ...] = (
        *(names.OURS, names.OURS_INVARIANT),
        *(*EQUINOX, names.EQUINOX, *FLAX, names.TORCH),
    )
    rounds: int = 20
    least: float = 0.005  # seconds a timing
    spread: tuple[float, float] = (10, 90)  # percentiles over the rounds
    most_instances: int = 1
    copied: int = 0  # bytes, to measure the bandwidth of a copy
    memory: str = "system"
    compilations: int = 3  # the median counts
    stack: Shape = (32, 32, 8, 8)
    depth: int = 50
    # N of [N, 64, 16, 16]: 2^14 to 2^26 values, and others between them.
    growth: tuple[int, ...] = (*(2**i for i in range(13)), *(3**i for i in range(1, 8)))
    runs: int = 100
    for_bits: Shapes = Shapes(((16, 64, 32, 32),), ((1024, 768),))
    # To compare with arithmetic in float64: all that is timed, where it is None.
    to_agree: Shapes | None = None
    network: Sizes = Sizes(16, (16, 32), 10, 32, 32)

    @property
    def as_on_a_gpu(self) -> bool:
        return self.device != "cpu"

    def batch_norms(self, shapes: tuple[Shape, ...]) -> list[Problem]:
        layouts = [(shape, layout) for shape in shapes for layout in self.layouts]
        return [Problem(s, dtype, layout) for dtype in self.dtypes for s, layout in layouts]

    def layer_norms(self, shapes: tuple[Shape, ...]) -> list[Problem]:
        return [Problem(shape, dtype, ROWS) for dtype in self.dtypes for shape in shapes]

    def problems(self, shapes: Shapes) -> list[Problem]:
        return [*self.batch_norms(shapes.images), *self.layer_norms(shapes.rows)]

    def entered(self, problem: Problem, pass_: str = BOTH) -> list[str]:
        """Returns the peers that take part."""
        absent = {names.EQUINOX}
        if problem.rows:
            absent = {names.OURS_INVARIANT, *EQUINOX, names.NNX}
        if problem.dtype == "bf16":  # it mixes bf16 and f32 in one `select`, and fails
            absent |= {names.EQUINOX_EMA}
        # What takes long to compile is there only where it matters.
        if pass_ == FORWARD:
            absent |= {*KERNELS, names.TORCH_COMPILED}
        if problem.bytes <= LARGE:
            absent |= {names.TORCH_COMPILED}
        return [name for name in self.peers if name not in absent]


# What does not depend on the machine: results, and temporaries from 1 MiB on. (In smaller
# arrays the first level of the sums is a larger part.)
QUICK = Job(
    parts=("agreement", "time", "compile"),
    shapes=((16, 64, 32, 32), (64, 128, 8, 8)),
    rows=((1024, 256),),
    dtypes=("f32",),
    peers=(names.OURS, *EQUINOX, names.EQUINOX),
    rounds=3,
    compilations=1,
)

# Channels and size of what the norms of a ResNet-50 are given.
RESNET_50 = (
    *((64, 112, 112), (64, 56, 56), (256, 56, 56), (128, 28, 28), (512, 28, 28)),
    *((256, 14, 14), (1024, 14, 14), (512, 7, 7), (2048, 7, 7)),
)
GPU = Job(
    device="gpu",
    parts=("bits", "agreement", "training", "layer_norm", "time"),
    shapes=tuple((n, *shape) for n in (256, 32) for shape in reversed(RESNET_50)),
    layouts=(FIRST, LAST),
    rows=tuple((8192, width) for width in (768, 1024, 2048, 4096, 8192, 16384)),
    # Equinox's other mode fails in bf16, and moves as many bytes; nnx has linen's arithmetic.
    peers=(
        *(names.OURS, names.OURS_XLA, *KERNELS),
        *(names.EQUINOX_BATCH, names.EQUINOX, names.LINEN, *IN_TORCH),
    ),
    rounds=7,
    least=0.01,
    spread=(25, 75),
    most_instances=24,
    copied=2**30,
    for_bits=Shapes(((64, 256, 56, 56), (256, 512, 7, 7)), ((8192, 4096), (64, 100_000))),
    to_agree=Shapes(((8, 64, 14, 14),), ((256, 768),)),
    network=Sizes(),
)
GPU_QUICK = dataclasses.replace(GPU, parts=("bits", "agreement"), dtypes=("bf16",), runs=20)
SMALL = Shapes(((4, 8, 3, 5),), ((16, 24),))
REHEARSAL = dataclasses.replace(
    GPU,
    device="rehearsal",
    shapes=SMALL.images,
    rows=SMALL.rows,
    dtypes=("bf16",),
    peers=tuple(n for n in GPU.peers if n not in (*KERNELS, names.TORCH_COMPILED)),
    rounds=2,
    least=0.0,
    most_instances=2,
    copied=2**16,
    runs=3,
    for_bits=SMALL,
    to_agree=None,
    network=Sizes(4, (), 5, 2, 8),  # a block compiles for seconds
)
# By device: the whole job, and the quick one.
JOBS = {"cpu": (Job(), QUICK), "gpu": (GPU, GPU_QUICK), "rehearsal": (REHEARSAL, REHEARSAL)}


def shape_name(shape: Shape) -> str:
    return "x".join(map(str, shape))
