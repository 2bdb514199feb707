"""Checks the results of a strategy; an error names the method and quotes the result."""

import dataclasses
import textwrap
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from eqx_norm._memory import form
from eqx_norm.strategies import AbstractStrategy, Moments, TrainingBatch


def update(
    approach: AbstractStrategy[Any], batch: TrainingBatch, memory: PyTree
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
    used = _checked(used, batch.mean.shape, f"{name} returned, before the memory,")
    return used, _in_form(learnt, memory, name)


def infer(
    approach: AbstractStrategy[Any], memory: PyTree, channels: int, unbiased: bool
) -> Moments:
    """Returns `approach.infer(memory)`, with the `ddof` of the layer; raises unless it is
    `Moments` of all channels."""
    name = f"{type(approach).__name__}.infer"
    return _checked(approach.infer(memory), (channels,), f"{name} returned", int(unbiased))


def running(layer: PyTree, memory: PyTree) -> Moments:
    """Returns the moments by which a `BatchNorm` with this memory infers."""
    return infer(layer.approach, memory, layer.input_size, layer.unbiased)


def load(approach: AbstractStrategy[Any], learnt: Moments, empty: PyTree) -> PyTree:
    """Returns `approach.load(learnt)`; raises unless it has the form of the `empty` memory, and
    counts that are known."""
    name = f"{type(approach).__name__}.load"
    return _in_form(approach.load(learnt), empty, name, must_count=True)


def _in_form(returned: PyTree, given: PyTree, name: str, must_count: bool = False) -> PyTree:
    """Returns the memory with arrays in place of numbers, plain `Moments` in place of each
    `TrainingBatch`, and `ddof` and a count as in `given`. A count that is not known is nominal,
    1, unless it `must_count`."""

    def alike(node: PyTree, given: PyTree) -> PyTree:
        if not (isinstance(node, Moments) and isinstance(given, Moments)):
            return node
        if given.count is None:
            return Moments(None, node.mean_pair, node.memory_variance, given.ddof)
        node = node.moments if isinstance(node, TrainingBatch) else node
        is_nominal = node.count is None and not must_count
        count = jnp.ones_like(given.count) if is_nominal else node.known_count
        return dataclasses.replace(node, count=count, ddof=given.ddof)

    def is_moments(node: PyTree) -> bool:
        return isinstance(node, Moments)

    nodes, structure = jax.tree.flatten(returned, is_leaf=is_moments)
    like = jax.tree.leaves(given, is_leaf=is_moments)
    if len(nodes) == len(like):
        nodes = map(alike, nodes, like)
    returned = jax.tree.map(jnp.asarray, jax.tree.unflatten(structure, nodes))
    if form(returned) != form(given):
        raise ValueError(
            f"{name} returned a memory of another structure, shape or dtype:\n"
            f"    {eqx.tree_pformat(returned)}\nwhere `init` has made\n"
            f"    {eqx.tree_pformat(given)}\n"
            "Return a memory of that form."
        )
    return returned


def _checked(used: object, shape: tuple[int, ...], returned: str, ddof: int = 0) -> Moments:
    if not isinstance(used, Moments):
        has_moments = isinstance(getattr(used, "moments", None), Moments)
        fix = (
            "Make them from a mean and a variance per channel: "
            "eqx_norm.strategies.Moments.of(mean, variance)."
        )
        if has_moments:
            fix = "Return the .moments of this object instead."
        raise ValueError(
            f"{returned} {described(used)}, but the layer normalises by Moments. {fix}"
        )
    if used.mean.shape != shape or used.m2.shape != shape:
        raise ValueError(
            f"{returned} Moments with a mean of shape {used.mean.shape} and an m2 of shape "
            f"{used.m2.shape}, but this layer has {shape[0]} channels: give one value for each."
        )
    return Moments(used.count, used.mean_pair, used.m2, ddof)


def described(value: object) -> str:
    """Returns a description of `value` in one line."""
    if value is None:
        return "nothing (None)"
    if type(value) is tuple:
        return f"a tuple of {len(value)}, ({', '.join(map(described, value))})"
    kind = "an array, " if eqx.is_array(value) else ""
    return kind + textwrap.shorten(eqx.tree_pformat(value), 120)
