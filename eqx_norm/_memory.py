"""A strategy's memory inside `eqx.nn.State`: its dtype, its form, and taking it out."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from eqx_norm.strategies import AbstractStrategy


def statistics_dtype(dtype: DTypeLike) -> jnp.dtype:
    """The dtype to remember means in, for an input or weight of `dtype`.

    The default float (float32, float64 under x64), or the complex dtype of that precision:
    a running average in half precision would stop moving.
    """
    return jnp.result_type(complex if jnp.issubdtype(dtype, jnp.complexfloating) else float)


def recall(
    state: eqx.nn.State,
    index: eqx.nn.StateIndex[Any],
    approach: AbstractStrategy[Any],
    channels: int,
) -> Any:
    """The memory at `index`, which `approach` must have made for so many channels."""
    try:
        memory = state.get(index)
    except KeyError:
        raise ValueError(
            "The state given holds nothing of this layer: it was made for another model. Make "
            "both together, `model, state = eqx.nn.make_with_state(Model)(...)`, and pass on "
            "the state that each call returns."
        ) from None
    expected = jax.eval_shape(lambda: approach.init(channels, jnp.float32))
    if _shapes(memory) != _shapes(expected):
        raise ValueError(
            f"The state given belongs to another layer. This one, with input_size={channels} "
            f"and approach={approach}, remembers\n    {eqx.tree_pformat(expected)}\n"
            f"but the state holds\n    {eqx.tree_pformat(memory)}"
        )
    return memory


def check_form(approach: AbstractStrategy[Any], before: Any, after: Any) -> None:
    """`ValueError` unless `approach` gave its memory back in the form that it had."""
    was, became = (_forms(memory) for memory in (before, after))
    if not eqx.tree_equal(was, became):
        raise ValueError(
            f"{type(approach).__name__}.update returned a memory of another structure, shape "
            f"or dtype:\n    {eqx.tree_pformat(became)}\nwhere it was given\n"
            f"    {eqx.tree_pformat(was)}\n"
            "A strategy's memory keeps the form that its `init` gave it."
        )


def _forms(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def _shapes(tree: Any) -> tuple[Any, list[tuple[int, ...]]]:
    return jax.tree.structure(tree), [leaf.shape for leaf in jax.tree.leaves(tree)]
