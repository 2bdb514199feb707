"""Defines, reads and checks the memory of a `BatchNorm`, its entry in `eqx.nn.State`."""

import functools
import textwrap
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int, PyTree

from eqx_norm._compiled import is_fixed
from eqx_norm._jax.constants import full
from eqx_norm.strategies import AbstractStrategy, Moments

STACKED = (
    "The state given has one more axis in front: a jax.vmap without out_axes=(0, None) has "
    "returned a copy for each example. With out_axes=(0, None) it returns one state for all."
)

ENSEMBLE = (
    "If the layer is stacked, as in an ensemble, map over its members by eqx.filter_vmap, or "
    "take the i-th one: jax.tree.map(lambda leaf: leaf[i] if eqx.is_array(leaf) else leaf, "
    "(layer, state))."
)


def statistics_dtype(dtype: DTypeLike) -> jnp.dtype:
    """Returns the dtype of running means: float32, or float64 under x64, or the complex dtype
    of that precision. In half precision a running average would stop moving."""
    return jnp.result_type(complex if jnp.issubdtype(dtype, jnp.complexfloating) else float)


def dtype_of(memory: PyTree) -> jnp.dtype:
    """Returns the dtype of the mean in a new memory, complex if this `memory` is."""
    is_complex = any(jnp.iscomplexobj(leaf) for leaf in jax.tree.leaves(memory))
    return statistics_dtype(complex if is_complex else float)


class Remembered(NamedTuple):
    """Holds all that a layer remembers, `state.get(layer.memory_index)`.

    **Fields:** `statistics`: the strategy's memory; `counts`, `(2,)`, int32: the number of
    batches that were remembered, and of those that were not, because they were not finite.
    """

    statistics: PyTree
    counts: Int[Array, "*members 2"]

    @property
    def accepted(self) -> Int[Array, "*members"]:
        """Returns how many batches were remembered."""
        return self.counts[..., 0]

    @property
    def rejected(self) -> Int[Array, "*members"]:
        """Returns how many batches were not finite."""
        return self.counts[..., 1]


def new(approach: AbstractStrategy[Any], channels: int, dtype: DTypeLike) -> Remembered:
    """Returns the memory of a layer before any batch; `dtype` is the dtype of the weights."""
    memory = approach.init(channels, statistics_dtype(dtype))
    return Remembered(memory, full((2,), 0, jnp.int32))


def _abstract_new(
    approach: AbstractStrategy[Any], channels: int, dtype: DTypeLike
) -> Remembered:
    """Returns `new` with shapes and dtypes in place of arrays."""
    return jax.eval_shape(lambda: new(approach, channels, dtype))


# As large as JAX's own caches of compiled programs. A layer that is no longer in this cache is
# traced again at each call.
_abstract_new_once = functools.lru_cache(maxsize=4096)(_abstract_new)


def checked_state(state: object) -> eqx.nn.State:
    """Returns the state; raises `ValueError` for `None` and other objects."""
    if not isinstance(state, eqx.nn.State):
        given = textwrap.shorten(eqx.tree_pformat(state), 120)
        raise ValueError(
            f"state={given} is no eqx.nn.State, which holds the running statistics: "
            "`model, state = eqx.nn.make_with_state(Model)(...)` makes it. (A mask is given by "
            "name, layer(x, mask=mask).)"
        )
    return state


def entry(layer: PyTree, state: object) -> Remembered:
    """Returns what the state holds for a `BatchNorm`, or for the members of an ensemble; raises
    `ValueError` if there is nothing."""
    try:
        return checked_state(state).get(layer.memory_index)
    except KeyError:
        raise ValueError(
            "The state given has no entry for this layer: it was made for another model. Make "
            "both together, `model, state = eqx.nn.make_with_state(Model)(...)`, and pass the "
            "state that each call returns to the next."
        ) from None


def recall(layer: PyTree, state: object) -> Remembered:
    """Returns the memory of a `BatchNorm`; raises as `entry` and `check` do."""
    remembered = entry(layer, state)
    check(layer, remembered)
    return remembered


def stays_finite(before: PyTree, after: PyTree, batch: Moments) -> Bool[Array, ""]:
    """Returns whether a batch is finite, and each finite number of the memory stays finite:
    squares of finite values may overflow. (A strategy may start from infinities.)"""
    finite, stays = jnp.isfinite(batch.mean) & jnp.isfinite(batch.m2), jnp.array(True)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        if not eqx.is_inexact_array(new):
            continue
        of_leaf = jnp.isfinite(new) | ~jnp.isfinite(old)
        # One reduction serves all arrays, because XLA:CPU compiles each into a loop.
        if not _one_ends_with_the_other(of_leaf.shape, finite.shape):
            of_leaf = of_leaf.all()
        finite, stays, of_leaf = jnp.broadcast_arrays(finite, stays, of_leaf)
        stays &= of_leaf
    finite, stays = jnp.broadcast_arrays(finite, stays)
    # The reduction has two operands, because XLA:CPU makes two loops of a reduction of one
    # array of more than 32 bools. No issue upstream. With one operand
    # tests/operation/test_on_cpu.py, `quick_to_compile`, fails (jax 0.10.2 and 0.12.0.1).
    axes = tuple(range(finite.ndim))
    return lax.bitwise_and(*lax.reduce((finite, stays), (True, True), _both, axes))


def _both(
    a: tuple[Bool[Array, ""], ...], b: tuple[Bool[Array, ""], ...]
) -> tuple[Bool[Array, ""], ...]:
    return tuple(map(lax.bitwise_and, a, b))


def _one_ends_with_the_other(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    axes = min(len(a), len(b))
    return a[len(a) - axes :] == b[len(b) - axes :]


def form(memory: PyTree) -> tuple[Any, list[tuple[int, ...]], list[np.dtype]]:
    """Returns the tree structure of a memory, and its arrays' shapes and dtypes."""
    leaves, structure = jax.tree.flatten(memory)
    return structure, [leaf.shape for leaf in leaves], [leaf.dtype for leaf in leaves]


def check(layer: PyTree, remembered: Remembered) -> None:
    """Raises `ValueError` unless the memory of a `BatchNorm` has the form of a new memory."""
    channels, approach, memory = layer.input_size, layer.approach, remembered.statistics
    has_arrays = jax.tree.leaves(eqx.filter(approach, eqx.is_array))
    is_hashable = is_fixed(approach) and not has_arrays
    abstract_new = _abstract_new_once if is_hashable else _abstract_new
    init = abstract_new(approach, channels, dtype_of(memory))
    structure, shapes, dtypes = form(remembered)
    expected_structure, expected_shapes, expected_dtypes = form(init)
    if structure != expected_structure or shapes != expected_shapes:
        cause = "The state given belongs to another layer."
        unstacked_shapes = [shape[1:] for shape in shapes]
        if structure == expected_structure and unstacked_shapes == expected_shapes:
            is_member = layer.weight is None or layer.weight.ndim == 1
            cause = STACKED if is_member else ENSEMBLE
        raise ValueError(
            f"{cause} This layer, with input_size={channels} and approach={approach}, "
            f"remembers\n    {eqx.tree_pformat(init.statistics, struct_as_array=True)}\n"
            f"but the state holds\n    {eqx.tree_pformat(memory)}"
        )
    for actual, expected in zip(dtypes, expected_dtypes, strict=True):
        if actual != expected:
            raise ValueError(_dtype_message(actual, expected))


def _dtype_message(actual: jnp.dtype, expected: jnp.dtype) -> str:
    x64 = statistics_dtype(float) == "float64"
    if jnp.issubdtype(expected, jnp.integer):
        cause = (
            f"counts in {expected}: of a state average only the floats, where "
            "eqx.is_inexact_array(leaf)"
        )
    elif {actual.name, expected.name} in ({"float32", "float64"}, {"complex64", "complex128"}):
        cause = (
            f"remembers {expected} with jax_enable_x64={x64}: the state was made under the "
            f"other setting. Set that, jax.config.update('jax_enable_x64', {not x64})"
        )
    else:
        cast = f"lambda a: a.astype('{actual}') if eqx.is_inexact_array(a) else a"
        cause = (
            f"remembers {expected} whatever the dtypes of weights and input (a running average "
            "in half precision stops moving). Cast the model and leave its state as it is, "
            f"model = jax.tree.map({cast}, model)"
        )
    return (
        f"The state given holds {actual}, but this layer {cause}. A new state has the dtypes "
        "that restore this one, without the digits that rounding has lost:\n"
        "    _, like = eqx.nn.make_with_state(Model)(...)\n"
        "    state = jax.tree.map(lambda a, b: a.astype(b.dtype), state, like)"
    )
