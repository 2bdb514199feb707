"""Lists the programs that are compiled, and makes them.

Each is a batch norm and its activation, alone or between convolutions: one of the layers of
`lab.peers`, with float32 parameters and an output of the dtype of x, state update included.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
from jax import Array

from experiments.lab.passes import BOTH, FORWARD, NO_NORM, batch_norm, function
from experiments.lab.peers import Layer, names

APART = "forward, then backward"
BATCH_NORM, BETWEEN = "BatchNorm + ReLU", "conv, BatchNorm + ReLU, conv"
ALONE = {
    BATCH_NORM: jax.nn.relu,
    "BatchNorm + GELU": jax.nn.gelu,
    "BatchNorm + SiLU": jax.nn.silu,
}
DTYPES = ("bfloat16", "float32", "float16")

DENSE, IMAGES = (65536, 256), (64, 64, 32, 32)
# Shapes of a ResNet-50, channels side by side as convolutions leave them on a GPU.
COLUMNS = (DENSE, (802816, 64), (6272, 1024), (1568, 2048))


class Case(NamedTuple):
    """Names a program for a device; `implementation`: a peer, or `NO_NORM`."""

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
    """Returns those for one device, on an H200 with what this layer is compared with."""
    compared = _compared(quick) if device == "H200" else ()
    return list(dict.fromkeys([*compared, *_on_each(device, quick)]))


def _compared(quick: bool) -> Iterator[Case]:
    ours, dtypes = (names.OURS_XLA, names.OURS_PALLAS), DTYPES[:1] if quick else DTYPES[:2]
    arrays = list(itertools.product((DENSE, IMAGES), dtypes))
    for norm, array, name in itertools.product(ALONE, arrays, ours):
        yield Case("H200", norm, *array, BOTH, name)
    if quick:
        return
    every = *ours, names.OURS_SEPARATE, names.EQUINOX_BATCH, names.EQUINOX_EMA
    for array, direction, name in itertools.product(arrays, (FORWARD, BOTH, APART), every):
        yield Case("H200", BATCH_NORM, *array, direction, name)
    for dtype, name in itertools.product(dtypes, every):
        yield Case("H200", BETWEEN, IMAGES, dtype, BOTH, name)


def _on_each(device: str, quick: bool) -> Iterator[Case]:
    between = [NO_NORM, names.OURS_XLA]
    if device != "A100":  # which Mosaic's kernel is not for
        between.append(names.OURS_PALLAS)
        shapes, dtypes = (COLUMNS[:1], DTYPES[:1]) if quick else (COLUMNS, DTYPES)
        for norm in itertools.product(shapes, dtypes, (FORWARD, APART)):
            yield Case(device, BATCH_NORM, *norm, names.OURS_PALLAS)
    for dtype, name in itertools.product(DTYPES[:2], between):
        yield Case(device, BETWEEN, IMAGES, dtype, BOTH, name)


def program(case: Case) -> tuple[Callable[..., Any], Sequence[Any]]:
    """Returns a function to compile, and what describes its arguments."""
    made, parameters = _layer(case)
    arrays = [case.x] if case.direction == FORWARD else [case.x, case.x]
    run = function(made, case.direction, apart=case.direction == APART)
    return run, (parameters, made.memory, *arrays)


def _layer(case: Case) -> tuple[Layer, Any]:
    """Returns a layer with its activation, and what describes its parameters."""
    channels, vector = case.shape[1], jax.ShapeDtypeStruct(case.shape[1:2], "float32")
    activation = ALONE.get(case.program, jax.nn.relu)
    norm = batch_norm(case.implementation, channels, activation=activation)
    if case.program in ALONE:
        return norm, (vector, vector)
    convolution = eqx.filter_eval_shape(
        eqx.nn.Conv2d, channels, channels, 3, padding=1, dtype=case.dtype, key=jax.random.key(0)
    )

    def between(parameters: Any, memory: Any, x: Array) -> Any:
        before, affine, after = parameters
        y, memory = norm.train(affine, memory, jax.vmap(before)(x))
        return jax.vmap(after)(y), memory

    return norm._replace(train=between), (convolution, (vector, vector), convolution)
