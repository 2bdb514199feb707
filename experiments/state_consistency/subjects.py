"""Lets the script run a layer, with its memory, in each of the ways that JAX has.

The momentum is the share of the running average that an update leaves. It is near 0, so that
the average is nearly the batch's; and a power of two, so that what is left of the old average
can be taken out again: (after - momentum * before) / (1 - momentum) is what an update took in.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments.lab import peers
from experiments.lab.peers import names

from .row import OURS, Row

EPS = 1e-3  # that of the thread's script
MOMENTUM = 1 / 16


class Memory(NamedTuple):
    kept: tuple[np.ndarray, ...]  # means, variances, and what else is remembered
    rejected: float = np.nan  # the layer's own count of batches not learnt from


class Subject(Protocol):
    def evaluate(self, x: np.ndarray) -> np.ndarray: ...

    def train(self, x: np.ndarray) -> list[np.ndarray]: ...  # output, any gradients

    def trace(self, x: np.ndarray) -> None: ...  # as much of `train` as needs no values

    def memory(self) -> Memory: ...


# The running means and variances, in float64.
Average = tuple[np.ndarray, np.ndarray]


def average(layer: str, memory: Memory) -> Average | None:
    """Returns the running average that updates are steps of; `None` before there is any."""
    mean, variance, *rest = (np.asarray(array, np.float64) for array in memory.kept)
    if layer in OURS:  # what is remembered is debiased: the average from 0, over its weight
        return np.asarray(mean * rest[0]), np.asarray(variance * rest[0])
    if layer == names.EQUINOX_EMA and rest[0]:  # its first batch replaces what is there
        return None
    return mean, variance


class InJax:
    def __init__(self, row: Row):
        made = (row.layer, row.implementation, row.shape[1])
        self._layer = _layer(*made)
        self._train = _step(*made, row.way, "train", row.backward)
        self._evaluate = _step(*made, row.way, "evaluate", False)
        self._affine = jnp.ones(row.shape[1]), jnp.zeros(row.shape[1])
        self._memory: Any = self._layer.memory
        self._ours = row.layer in OURS

    def evaluate(self, x: np.ndarray) -> np.ndarray:
        y, self._memory, _ = self._evaluate(self._affine, self._memory, jnp.asarray(x))
        return np.asarray(y, np.float32)

    def train(self, x: np.ndarray) -> list[np.ndarray]:
        y, self._memory, gradients = self._train(self._affine, self._memory, jnp.asarray(x))
        return [np.asarray(leaf) for leaf in (y, *jax.tree.leaves(gradients))]

    def trace(self, x: np.ndarray) -> None:
        jax.eval_shape(self._train, self._affine, self._memory, x)

    def memory(self) -> Memory:
        kept = tuple(np.asarray(array) for array in self._layer.statistics(self._memory))
        return Memory(kept[:-1], float(kept[-1])) if self._ours else Memory(kept)


# Cached, so that what is compiled once serves every batch.
@functools.cache
def _layer(name: str, implementation: str, channels: int) -> peers.Layer:
    of_ours: dict[str, Any] = {"implementation": implementation} if name in OURS else {}
    return peers.batch_norm(name, channels, momentum=MOMENTUM, eps=EPS, **of_ours)


@functools.cache
def _step(
    name: str, implementation: str, channels: int, way: str, mode: str, backward: bool
) -> Callable[[Any, Any, jax.Array], tuple[jax.Array, Any, Any]]:
    compiled, inside = WAYS[way]
    apply = inside(getattr(_layer(name, implementation, channels), mode))

    def step(affine: Any, memory: Any, x: jax.Array) -> tuple[jax.Array, Any, Any]:
        def loss(affine: Any, x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, Any]]:
            y, after = apply(affine, memory, x)
            return jnp.sum(jnp.sin(y)), (y, after)

        if backward:
            gradients, given = jax.grad(loss, (0, 1), has_aux=True)(affine, x)
            return *given, gradients
        return *apply(affine, memory, x), ()

    return jax.jit(step) if compiled else step


def _scan(apply: peers.Apply) -> peers.Apply:
    def scanned(affine: Any, memory: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        def body(memory: Any, x: jax.Array) -> tuple[Any, jax.Array]:
            y, memory = apply(affine, memory, x)
            return memory, y

        memory, y = lax.scan(body, memory, x[None])
        return y[0], memory

    return scanned


class Way(NamedTuple):
    compiled: bool
    inside: Callable[[peers.Apply], peers.Apply]


OP_BY_OP, JIT = "op by op", "jit"
WAYS = {
    OP_BY_OP: Way(False, lambda apply: apply),
    JIT: Way(True, lambda apply: apply),
    "checkpoint, op by op": Way(False, jax.checkpoint),
    "checkpoint, jit": Way(True, jax.checkpoint),
    "scan, jit": Way(True, _scan),
}


def ways(layer: str) -> tuple[str, ...]:
    """Returns the ways in which a layer can be run."""
    eager = names.package(layer) == "torch"
    return (OP_BY_OP, "checkpoint, op by op") if eager else tuple(WAYS)


def usual(layer: str) -> str:
    """Returns the way in which its users run it."""
    return OP_BY_OP if names.package(layer) == "torch" else JIT
