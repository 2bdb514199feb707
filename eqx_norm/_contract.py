"""Checks the results of a strategy; an error names the method and quotes the result."""

import textwrap

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from eqx_norm._memory import form
from eqx_norm.strategies import AbstractStrategy, Moments, TrainingBatch


def update(
    approach: AbstractStrategy[PyTree], batch: TrainingBatch, memory: PyTree
) -> tuple[Moments, PyTree]:
    """Returns `approach.update(batch, memory)`, checked, with plain `Moments` in the memory."""
    result = approach.update(batch, memory)
    name = f"{type(approach).__name__}.update"
    if not (isinstance(result, tuple | list) and len(result) == 2):
        raise ValueError(
            f"{name} returned {described(result)}, but a training step needs two things, the "
            "moments that normalise the batch and the new memory: return used, memory"
        )
    used, learnt = result
    used = _moments(used, batch.mean.shape, f"{name} returned, before the memory,")
    return used, _memory(_plain(learnt), memory, name)


def infer(approach: AbstractStrategy[PyTree], memory: PyTree, channels: int) -> Moments:
    """Returns `approach.infer(memory)`; raises unless it is `Moments` of all channels."""
    name = f"{type(approach).__name__}.infer"
    return _moments(approach.infer(memory), (channels,), f"{name} returned")


def load(approach: AbstractStrategy[PyTree], learnt: Moments, empty: PyTree) -> PyTree:
    """Returns `approach.load(learnt)`; raises unless it has the form of the `empty` memory."""
    return _memory(_plain(approach.load(learnt)), empty, f"{type(approach).__name__}.load")


def _memory(returned: PyTree, given: PyTree, name: str) -> PyTree:
    if form(returned) != form(given):
        raise ValueError(
            f"{name} returned a memory of another structure, shape or dtype:\n"
            f"    {eqx.tree_pformat(returned)}\nwhere `init` has made\n"
            f"    {eqx.tree_pformat(given)}\n"
            "Return a memory of that form."
        )
    return returned


def _moments(used: object, shape: tuple[int, ...], returned: str) -> Moments:
    if not isinstance(used, Moments):
        has_moments = isinstance(getattr(used, "moments", None), Moments)
        raise ValueError(
            f"{returned} {described(used)}, but the layer normalises by Moments. "
            + (
                "Return the .moments of this object instead."
                if has_moments
                else "Make them from a mean and a variance per channel: "
                "eqx_norm.strategies.Moments.of(mean, variance)."
            )
        )
    if used.mean.shape != shape or used.m2.shape != shape:
        raise ValueError(
            f"{returned} Moments with a mean of shape {used.mean.shape} and an m2 of shape "
            f"{used.m2.shape}, but this layer has {shape[0]} channels: give one value for each."
        )
    # `ddof` and the fields of a subclass are dropped, so that the moments of training and
    # inference are the same pytree, and the program can select one of the two.
    return Moments(used.count, used.mean_pair, used.m2)


def _plain(memory: PyTree) -> PyTree:
    """Returns the memory with plain `Moments` in place of each `TrainingBatch`, and arrays in
    place of numbers."""

    def is_batch(node: PyTree) -> bool:
        return isinstance(node, TrainingBatch)

    memory = jax.tree.map(lambda n: n.moments if is_batch(n) else n, memory, is_leaf=is_batch)
    return jax.tree.map(jnp.asarray, memory)


def described(value: object) -> str:
    """Returns a description of `value` in one line."""
    if value is None:
        return "nothing (None)"
    if type(value) is tuple:
        return f"a tuple of {len(value)}, ({', '.join(map(described, value))})"
    kind = "an array, " if eqx.is_array(value) else ""
    return kind + textwrap.shorten(eqx.tree_pformat(value), 120)
