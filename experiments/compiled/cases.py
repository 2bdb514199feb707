"""Lists the programs that are compiled, and makes them.

Each is a norm and its activation, alone or between convolutions: one of the layers of
`lab.peers`, with float32 parameters and an output of the dtype of x, state update included.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
from jax import Array

from experiments.lab import peers
from experiments.lab.exact import EPS
from experiments.lab.passes import BOTH, FORWARD, NO_NORM, batch_norm, function
from experiments.lab.peers import Layer, names

RELU_AFTER = f"{names.OURS_XLA}, ReLU after"
APART = "forward, then backward"
BATCH_NORM, BETWEEN = "BatchNorm + ReLU", "conv, BatchNorm + ReLU, conv"
LAYER_NORM, LAYER_NORM_GELU = "LayerNorm", "LayerNorm + GELU"
DTYPES = ("bfloat16", "float32", "float16")

DENSE, IMAGES = (65536, 256), (64, 64, 32, 32)
# Shapes of a ResNet-50, channels side by side as convolutions leave them on a GPU.
ALIGNED = [(BATCH_NORM, s) for s in (DENSE, (802816, 64), (6272, 1024), (1568, 2048))]
# Others: 200 and 33 channels; images as they come from the user, in 3 channels and in one; rows
# that are read twice, and rows that a program holds. Mosaic's kernels serve none of these.
OTHERS = [
    *((BATCH_NORM, s) for s in ((65521, 200), (65521, 33))),
    *((BATCH_NORM, s) for s in ((32, 3, 224, 224), (64, 1, 1000, 1000))),
    *((LAYER_NORM, s) for s in ((8192, 16384), (64, 1000000))),
    *((LAYER_NORM_GELU, (8192, values)) for values in (768, 1000, 4096)),
]
QUICK = [ALIGNED[0], OTHERS[1], OTHERS[-3]]


class Case(NamedTuple):
    """Names a program for a device; `implementation`: a peer, `NO_NORM` or `RELU_AFTER`."""

    device: str
    program: str
    shape: tuple[int, ...]
    dtype: str
    direction: str
    implementation: str

    @property
    def x(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, self.dtype)


def cases(device: str, quick: bool) -> list[Case]:
    """Returns those for one device, on an H200 with what the kernels are compared with."""
    compared = _layers(quick) if device == "H200" else ()
    return list(dict.fromkeys([*compared, *_kernels(device, quick)]))


def _layers(quick: bool) -> Iterator[Case]:
    wanted, directions = [names.OURS_XLA], [BOTH]
    if not quick:
        wanted += [names.OURS_TRITON, RELU_AFTER, names.EQUINOX_BATCH, names.EQUINOX_EMA]
        directions = [FORWARD, BOTH, APART]
    for norm in itertools.product((DENSE, IMAGES), DTYPES[:2], directions, wanted):
        yield Case("H200", BATCH_NORM, *norm)
    for dtype, name in itertools.product(DTYPES[:2], wanted):
        yield Case("H200", BETWEEN, IMAGES, dtype, BOTH, name)


def _kernels(device: str, quick: bool) -> Iterator[Case]:
    norms, dtypes = (QUICK, DTYPES[:1]) if quick else ([*ALIGNED, *OTHERS], DTYPES)
    mosaic = [names.OURS_MOSAIC] * (device != "A100")
    for norm, dtype, direction in itertools.product(norms, dtypes, (FORWARD, APART)):
        wanted = [names.OURS_TRITON, *(mosaic if norm in ALIGNED else ())]
        beside_xla = device == "H200" and not quick and dtype != "float16"
        kind, shape = norm
        if beside_xla and kind != LAYER_NORM_GELU:
            wanted.append(names.OURS_XLA)
        for name in wanted:
            yield Case(device, kind, shape, dtype, direction, name)
    between = (NO_NORM, names.OURS_XLA, names.OURS_TRITON, *mosaic)
    for dtype, name in itertools.product(DTYPES[:2], between):
        yield Case(device, BETWEEN, IMAGES, dtype, BOTH, name)


def program(case: Case) -> tuple[Callable[..., Any], Sequence[Any]]:
    """Returns a function to compile, and what describes its arguments."""
    made, parameters = _layer(case)
    run = function(made, case.direction, apart=case.direction == APART)
    arrays = [case.x] if case.direction == FORWARD else [case.x, case.x]

    def compiled(parameters: Any, *arrays: Array) -> Any:
        return run(parameters, made.memory, *arrays)

    return compiled, (parameters, *arrays)


def _layer(case: Case) -> tuple[Layer, Any]:
    """Returns a layer with its activation, and what describes its parameters."""
    if case.program in (LAYER_NORM, LAYER_NORM_GELU):
        gelu = jax.nn.gelu if case.program == LAYER_NORM_GELU else None
        norm = peers.layer_norm(case.implementation, case.shape[1:], eps=EPS, activation=gelu)
        return norm, _vectors(case.shape[1:]) if gelu else (None, None)
    channels, vectors = case.shape[1], _vectors(case.shape[1:2])
    if case.implementation == RELU_AFTER:
        norm = _then_relu(batch_norm(names.OURS_XLA, channels, relu=False))
    else:
        norm = batch_norm(case.implementation, channels)
    if case.program == BATCH_NORM:
        return norm, vectors
    convolution = eqx.filter_eval_shape(
        eqx.nn.Conv2d, channels, channels, 3, padding=1, dtype=case.dtype, key=jax.random.key(0)
    )

    def between(parameters: Any, memory: Any, x: Array) -> Any:
        before, affine, after = parameters
        y, memory = norm.train(affine, memory, jax.vmap(before)(x))
        return jax.vmap(after)(y), memory

    return norm._replace(train=between), (convolution, vectors, convolution)


def _then_relu(norm: Layer) -> Layer:
    def train(affine: Any, memory: Any, x: Array) -> tuple[Array, Any]:
        y, memory = norm.train(affine, memory, x)
        return jax.nn.relu(y), memory

    return norm._replace(train=train)


def _vectors(shape: tuple[int, ...]) -> Any:
    return (jax.ShapeDtypeStruct(shape, "float32"),) * 2
