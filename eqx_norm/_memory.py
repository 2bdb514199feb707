"""Defines what `BatchNorm` keeps in `eqx.nn.State`, reads it from there, and checks it."""

import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Bool, Int

from eqx_norm import _normalise
from eqx_norm.strategies import AbstractStrategy


def statistics_dtype(dtype: DTypeLike) -> jnp.dtype:
    """Returns the dtype of running means: float32, or float64 under x64, or the complex dtype
    of that precision. In half precision a running average would stop moving."""
    return jnp.result_type(complex if jnp.issubdtype(dtype, jnp.complexfloating) else float)


class Remembered(NamedTuple):
    """Holds all that a layer remembers, `state.get(layer.memory_index)`.

    **Fields:** `statistics`: the strategy's memory; `counts`, `(2,)`, int32: the numbers of
    batches that were remembered and, because they were not finite, not remembered.
    """

    statistics: Any
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
    """Returns what a layer remembers before any batch; `dtype` is that of its weights."""
    memory = approach.init(channels, statistics_dtype(dtype))
    return Remembered(memory, jnp.zeros(2, jnp.int32))


@functools.partial(jax.jit, inline=True)
def counted(counts: Int[Array, " n"], events: Bool[Array, " n"]) -> Int[Array, " n"]:
    """Returns `counts`, plus 1 where there is an event; each stops at the largest integer."""
    return counts + (events & (counts < jnp.iinfo(counts.dtype).max)).astype(counts.dtype)


def check_shared(held: Any, learnt: Any, axis_name: Any) -> None:
    """Raises `ValueError` if `learnt` differs between devices but `held` does not, by their
    types. With `shard_map(check_vma=False)` types do not say so, and nothing is checked."""
    axes = frozenset[Any]().union(*map(_varying, jax.tree.leaves(learnt)))
    axes = tuple(sorted(axes.difference(*map(_varying, jax.tree.leaves(held))), key=str))
    if axes:
        names = _normalise.names_of(axis_name)
        raise ValueError(
            f"The statistics over axis_name={axis_name!r} differ from device to device along "
            f"{axes}, but all devices share the state given. For statistics over all devices, "
            f"make the layer with axis_name={(*names, *axes)!r}. To normalise by each device's "
            f"own and share running statistics, with memory_axis_name={axes!r}. For separate "
            "running statistics, stack one state per device, pass the stack with "
            f"in_specs=P({axes!r}), and take its [0] inside."
        )


def whole(tree: Any) -> Any:
    """Returns the tree, not split over the explicit axes of a mesh."""
    return jax.tree.map(lambda array: _normalise.split(array, jax.P()), tree)


def placed_as(held: Any, learnt: Any) -> Any:
    """Returns `learnt`, split over a mesh as `held` is; raises `ValueError` if the two are on
    different meshes, which happens if `held` is not an argument of the program. (Otherwise
    `eqx.nn.State` would say only that "f32[4]" is not "f32[4]".)"""
    for before, after in zip(jax.tree.leaves(held), jax.tree.leaves(learnt), strict=True):
        own, mesh = (jax.typeof(array).sharding.mesh for array in (before, after))
        if own != mesh and (mesh.explicit_axes or mesh.manual_axes):
            raise ValueError(
                f"x is on the mesh {dict(mesh.shape)}, but the state given is on "
                f"{dict(own.shape) or 'no mesh'}: the function in jax.shard_map or jax.jit "
                "closes over the state. Pass the state as an argument, in jax.shard_map with "
                "in_specs=jax.P(); or, without jit, move it to the mesh: "
                "jax.device_put(state, jax.NamedSharding(mesh, jax.P()))."
            )
    return jax.tree.map(
        lambda a, b: _normalise.split(a, jax.typeof(b).sharding.spec), learnt, held
    )


def _varying(array: ArrayLike) -> frozenset[Any]:
    return jax.typeof(array).manual_axis_type.varying


def recall(
    state: eqx.nn.State,
    index: eqx.nn.StateIndex[Any],
    approach: AbstractStrategy[Any],
    channels: int,
) -> Remembered:
    """Returns what is remembered at `index`; raises as `check` does, and if there is none."""
    try:
        remembered = state.get(index)
    except KeyError:
        raise ValueError(
            "The state given has no entry for this layer: it was made for another model. Make "
            "both together, `model, state = eqx.nn.make_with_state(Model)(...)`, and pass the "
            "state that each call returns to the next."
        ) from None
    check(remembered.statistics, approach, channels)
    return remembered


def check(memory: Any, approach: AbstractStrategy[Any], channels: int) -> None:
    """Raises `ValueError` unless the memory has the form of `approach.init(channels)`."""
    is_complex = any(map(jnp.iscomplexobj, jax.tree.leaves(memory)))
    dtype = statistics_dtype(complex if is_complex else float)
    expected = jax.eval_shape(lambda: approach.init(channels, dtype))
    if _shapes(memory) != _shapes(expected):
        form = eqx.tree_pformat(expected, struct_as_array=True)
        (held, shapes), (made, right) = _shapes(memory), _shapes(expected)
        stacked = held == made and [shape[1:] for shape in shapes] == right
        raise ValueError(
            (
                "The state given has one more axis in front: it is the result of a jax.vmap "
                "without out_axes=(0, None), which returns one state for all examples."
                if stacked
                else "The state given belongs to another layer."
            )
            + f" This layer, with input_size={channels} "
            f"and approach={approach}, remembers\n    {form}\n"
            f"but the state holds\n    {eqx.tree_pformat(memory)}"
        )
    for held, made in zip(jax.tree.leaves(memory), jax.tree.leaves(expected), strict=True):
        if held.dtype != made.dtype:
            raise ValueError(_of_another_dtype(held.dtype, made.dtype))


def _of_another_dtype(held: jnp.dtype, made: jnp.dtype) -> str:
    back = (
        f"    state = jax.tree.map(lambda a: a.astype('{made}') if a.dtype == '{held}' else a, "
        "state)"
    )
    x64 = statistics_dtype(float) == "float64"
    if {held.name, made.name} in ({"float32", "float64"}, {"complex64", "complex128"}):
        return (
            f"The state given holds {held}, but with jax_enable_x64={x64} this layer remembers "
            f"{made}: the state was made under the other setting. Set that, "
            f"jax.config.update('jax_enable_x64', {not x64}), or convert the state:\n{back}"
        )
    cast = f"lambda a: a.astype('{held}') if eqx.is_inexact_array(a) else a"
    return (
        f"The state given holds {held}, but this layer remembers {made} whatever the dtypes of "
        "weights and input (a running average in half precision stops moving). Cast the model "
        f"and leave its state as it is:\n    model = jax.tree.map({cast}, model)\n"
        "If you have only the cast state, this restores its dtype, but not the digits lost by "
        f"rounding:\n{back}"
    )


def _shapes(tree: Any) -> tuple[Any, list[tuple[int, ...]]]:
    return jax.tree.structure(tree), [leaf.shape for leaf in jax.tree.leaves(tree)]
