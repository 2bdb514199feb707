"""Says what is timed: arrays, passes and peers, and a job for each device."""

import dataclasses
import math
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp

from experiments.lab.passes import BOTH as BOTH
from experiments.lab.passes import FORWARD as FORWARD
from experiments.lab.passes import INFERENCE as INFERENCE
from experiments.lab.passes import NO_NORM as NO_NORM
from experiments.lab.peers import names

from .shapes import CONVNEXT_T, LAYER_NORM, MOBILENET_V2, ODD, PERCEPTRONS, RESNET_50, images
from .shapes import Shape as Shape
from .shapes import shape_name as shape_name

DTYPES = {"f32": jnp.dtype(jnp.float32), "bf16": jnp.dtype(jnp.bfloat16)}

# How x lies in memory. A batch norm is given [N, C, *spatial] in the layout that each peer is
# made for; or all of them the same: that, or [N * H * W, C], as convolutions on a GPU have it.
# A layer norm is given rows, [N, values].
OWN, FIRST, LAST, ROWS = "each its own", "channels first", "channels last", "rows"

# A program's times are hot where it has just run, and cold where the caches hold nothing of its
# arrays, as after the rest of a network.
HOT, COLD = "hot", "cold"

# The parts of the experiment, in this order: first what a run that is cut short has to show.
PARTS = {
    "bits": "whether every run gives the same bits",
    "agreement": "whether all that is timed computes the same",
    "training": "the time of a network's training step",
    "layer_norm": "the time of a layer norm",
    "time": "the time of a batch norm with ReLU",
    "growth": "how that grows with the size of x",
    "residual": "the bytes that networks of pre-activation blocks move",
    "compile": "temporaries of a batch norm with ReLU, and the time to compile it",
    "networks": "the time to compile networks",
}
STEP = "training step"

IN_TORCH = (names.TORCH, names.TORCH_COMPILED)
BATCH_NORMS = (names.OURS, names.OURS_SEPARATE)  # what is claimed of either
EQUINOX = (names.EQUINOX_EMA, names.EQUINOX_BATCH)
FLAX = (names.LINEN, names.NNX)
PEERS = (*BATCH_NORMS, names.OURS_PALLAS, *EQUINOX, names.EQUINOX, *FLAX, *IN_TORCH)

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
# Values of x up to which it is compared with NumPy.
MOST_COMPARED = 2**20


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
    # A batch norm's x: of networks, of perceptrons, and of odd sizes.
    shapes: tuple[Shape, ...] = (
        *images(32, RESNET_50, MOBILENET_V2, CONVNEXT_T),
        *PERCEPTRONS,
        *ODD,
    )
    layouts: tuple[str, ...] = (OWN,)
    rows: tuple[Shape, ...] = LAYER_NORM
    # Of these shapes only every so many-th is measured in bf16, and for what it takes to
    # compile.
    every: int = 6
    dtypes: tuple[str, ...] = tuple(DTYPES)
    peers: tuple[str, ...] = (*BATCH_NORMS, *EQUINOX, names.EQUINOX, *FLAX, names.TORCH)
    passes: tuple[str, ...] = (BOTH, INFERENCE)  # of a batch norm
    caches: tuple[str, ...] = (HOT, COLD)
    rounds: int = 20
    # Fewer where x is large: as many as have so many bytes of it, but `fewest`.
    bytes_in_all: int = 250_000_000
    fewest: int = 7
    least: float = 0.005  # seconds a timing
    spread: tuple[float, float] = (10, 90)  # percentiles over the rounds
    most_instances: int = 1
    copied: int = 0  # bytes, to measure the bandwidth of a copy
    memory: str = "system"
    compilations: int = 5  # the median counts
    residual: Shape = (8, 16, 16, 16)  # what each of so many blocks is given
    blocks: tuple[int, ...] = (4, 8, 16)
    # N of [N, 64, 16, 16]: 2^14 to 2^26 values, and others between them.
    growth: tuple[int, ...] = (*(2**i for i in range(13)), *(3**i for i in range(1, 8)))
    runs: int = 100
    for_bits: Shapes = Shapes(((16, 64, 32, 32),), ((1024, 768),))
    # To compare with arithmetic in float64: what is timed, where it is None.
    to_agree: Shapes | None = None
    network: Sizes = Sizes(16, (16, 32), 10, 32, 32)

    @property
    def as_on_a_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def few(self) -> set[Shape]:
        """Returns the shapes that are measured in every way."""
        return {*self.shapes[:: self.every], *self.rows[:: self.every]}

    def batch_norms(self, shapes: tuple[Shape, ...]) -> list[Problem]:
        return self._problems(shapes, self.layouts)

    def layer_norms(self, shapes: tuple[Shape, ...]) -> list[Problem]:
        return self._problems(shapes, (ROWS,))

    def _problems(self, shapes: tuple[Shape, ...], layouts: tuple[str, ...]) -> list[Problem]:
        left_out = {*self.shapes, *self.rows} - self.few  # in bf16
        return [
            Problem(shape, dtype, layout)
            for dtype in self.dtypes
            for shape in shapes
            for layout in layouts
            if dtype == "f32" or shape not in left_out
        ]

    def problems(self, shapes: Shapes) -> list[Problem]:
        return [*self.batch_norms(shapes.images), *self.layer_norms(shapes.rows)]

    def compared(self) -> list[Problem]:
        """Returns what is compared with arithmetic in float64, which takes long if large."""
        found = self.problems(self.to_agree or Shapes(self.shapes, self.rows))
        return [p for p in found if math.prod(p.shape) <= MOST_COMPARED]

    def rounds_of(self, problem: Problem) -> int:
        """Returns how often what is timed on such an array is timed."""
        in_all = max(self.fewest, self.bytes_in_all // problem.bytes)
        return min(self.rounds, in_all)

    def entered(self, problem: Problem, pass_: str = BOTH) -> list[str]:
        """Returns the peers that take part."""
        absent = {names.EQUINOX}
        if problem.rows:
            # The kernel reads columns.
            absent = {names.OURS_SEPARATE, names.OURS_PALLAS, *EQUINOX, names.NNX}
        if problem.dtype == "bf16":  # it mixes bf16 and f32 in one `select`, and fails
            absent |= {names.EQUINOX_EMA}
        if pass_ == INFERENCE:  # where a ReLU inside and one after are one program
            absent |= {names.OURS_SEPARATE}
        # What takes long to compile is there only where it matters.
        if pass_ == FORWARD:
            absent |= {names.OURS_PALLAS, names.TORCH_COMPILED}
        if problem.bytes <= LARGE:
            absent |= {names.TORCH_COMPILED}
        return [name for name in self.peers if name not in absent]


# What does not depend on the machine: results, and temporaries from 1 MiB on. (In smaller
# arrays the first level of the sums is a larger part.)
QUICK = Job(
    parts=("agreement", "time", "residual", "compile"),
    shapes=((16, 64, 32, 32), (64, 128, 8, 8)),
    rows=((1024, 256),),
    every=1,
    dtypes=("f32",),
    peers=(*BATCH_NORMS, *EQUINOX, names.EQUINOX),
    passes=(BOTH,),
    rounds=3,
    compilations=1,
    blocks=(1, 3),
)

GPU = Job(
    device="gpu",
    parts=("bits", "agreement", "training", "layer_norm", "time"),
    shapes=(*images(256, RESNET_50[::-1]), *images(32, RESNET_50[::-1])),
    layouts=(FIRST, LAST),
    rows=tuple((8192, width) for width in (768, 1024, 2048, 4096, 8192, 16384)),
    every=1,
    # Equinox's other mode fails in bf16, and moves as many bytes; nnx has linen's arithmetic.
    peers=(
        *(names.OURS, names.OURS_PALLAS, names.EQUINOX_BATCH, names.EQUINOX),
        *(names.LINEN, *IN_TORCH),
    ),
    passes=(FORWARD, BOTH),
    caches=("",),  # of as many instances none is in the cache
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
    peers=tuple(n for n in GPU.peers if n not in (names.OURS_PALLAS, names.TORCH_COMPILED)),
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
