"""What a strategy answers, checked: an error names the method and what it returned."""

import textwrap
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from eqx_norm.strategies import AbstractStrategy, Moments, TrainingBatch


def update(approach: AbstractStrategy[Any]) -> Callable[..., tuple[Moments, Any]]:
    """Returns `approach.update`, whose answer is checked and remembers plain `Moments`."""

    def checked(batch: TrainingBatch, memory: Any) -> tuple[Moments, Any]:
        answer = approach.update(batch, memory)
        name = f"{type(approach).__name__}.update"
        if not (isinstance(answer, tuple | list) and len(answer) == 2):
            raise ValueError(
                f"{name} returned {_short(answer)}, but a training step needs two things, the "
                "moments that normalise the batch and the new memory: return used, memory"
            )
        used, learnt = answer
        returned = f"{name} returned, before the memory,"
        used = _moments(used, batch.mean.shape, returned)
        learnt = _without_step(learnt)
        _check_form(name, memory, learnt)
        return used, learnt

    return checked


def infer(approach: AbstractStrategy[Any], memory: Any, channels: int) -> Moments:
    """Returns `approach.infer(memory)`, checked."""
    returned = f"{type(approach).__name__}.infer returned"
    return _moments(approach.infer(memory), (channels,), returned)


def _moments(used: Any, shape: tuple[int, ...], returned: str) -> Moments:
    if not isinstance(used, Moments):
        has_moments = isinstance(getattr(used, "moments", None), Moments)
        raise ValueError(
            f"{returned} {_short(used)}, but what normalises are Moments. "
            + (
                "This has them: answer with its .moments."
                if has_moments
                else "Make them of a mean and a variance per channel: "
                "eqx_norm.strategies.Moments.of(mean, variance, mean_rest)."
            )
        )
    if used.mean.shape != shape or used.m2.shape != shape:
        raise ValueError(
            f"{returned} Moments with a mean of shape {used.mean.shape} and an m2 of shape "
            f"{used.m2.shape}, but this layer has {shape[0]} channels: give one value for each."
        )
    # No subclass, and no `ddof`, so that those of training and of inference have one form.
    return Moments(used.count, used.mean, used.m2, used.mean_rest)


def _check_form(name: str, before: Any, after: Any) -> None:
    was, became = (_forms(memory) for memory in (before, after))
    if not eqx.tree_equal(was, became):
        raise ValueError(
            f"{name} returned a memory of another structure, shape or dtype:\n"
            f"    {eqx.tree_pformat(became, struct_as_array=True)}\nwhere it was given\n"
            f"    {eqx.tree_pformat(was, struct_as_array=True)}\n"
            "A strategy's memory keeps the form that its `init` gave it."
        )


def _without_step(tree: Any) -> Any:
    """Returns `tree` with training batches replaced by their moments, as `init` makes them."""

    def is_batch(node: Any) -> bool:
        return isinstance(node, TrainingBatch)

    return jax.tree.map(lambda n: n.moments if is_batch(n) else n, tree, is_leaf=is_batch)


def _forms(tree: Any) -> Any:
    def form(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf))

    return jax.tree.map(form, tree)


def _short(answer: Any) -> str:
    """Returns one line about `answer`."""
    if answer is None:
        return "nothing (None)"
    if isinstance(answer, tuple):
        return f"a tuple of {len(answer)}, ({', '.join(map(_short, answer))})"
    kind = "an array, " if eqx.is_array(answer) else ""
    return kind + textwrap.shorten(eqx.tree_pformat(answer), 120)
