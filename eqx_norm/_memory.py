"""Reads a strategy's memory from `eqx.nn.State`, and says which dtype it has."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Bool, Int

from eqx_norm import _normalise
from eqx_norm.strategies import AbstractStrategy


def statistics_dtype(dtype: DTypeLike) -> jnp.dtype:
    """Returns the dtype of remembered means, for an input or weights of `dtype`.

    It is the default float dtype (float32, or float64 under x64), or the complex dtype of that
    precision. In half precision a running average would stop moving.
    """
    return jnp.result_type(complex if jnp.issubdtype(dtype, jnp.complexfloating) else float)


@jax.jit
def counted(count: Int[Array, ""], event: Bool[Array, ""]) -> Int[Array, ""]:
    """Returns `count`, plus 1 if `event` is true; the largest integer is not exceeded."""
    return count + (event & (count < jnp.iinfo(count.dtype).max)).astype(count.dtype)


def check_shared(held: Any, learnt: Any, axis_name: Any) -> None:
    """Raises `ValueError` if devices would learn different things, and the state given is, by
    its type, the same on all; where `shard_map` does not check types, nothing can be seen."""
    axes = frozenset[Any]().union(*map(_varying, jax.tree.leaves(learnt)))
    axes = tuple(sorted(axes.difference(*map(_varying, jax.tree.leaves(held))), key=str))
    if axes:
        names = _normalise.names_of(axis_name)
        raise ValueError(
            f"The statistics over axis_name={axis_name!r} differ from device to device along "
            f"{axes}, and the state given is one for all devices. To take them over all, make "
            f"the layer with axis_name={(*names, *axes)!r}; to normalise by those of each, and "
            f"remember those of all, with memory_axis_name={axes!r}. To give each its own, "
            f"stack one state for each, pass them with in_specs=P({axes!r}), and take [0] of "
            "what comes."
        )


def whole(tree: Any) -> Any:
    """Returns what is remembered, not split over a mesh with explicit axes."""
    return jax.tree.map(lambda array: _normalise.split(array, jax.P()), tree)


def placed_as(held: Any, learnt: Any) -> Any:
    """Returns what was learnt, split over a mesh as the state given.

    **Raises:** `ValueError` where that is no argument of the program: inside of a mesh it has
    another type then, and `eqx.nn.State` would say that "f32[4]" is not "f32[4]".
    """
    for before, after in zip(jax.tree.leaves(held), jax.tree.leaves(learnt), strict=True):
        own, mesh = (jax.typeof(array).sharding.mesh for array in (before, after))
        if own != mesh and (mesh.explicit_axes or mesh.manual_axes):
            raise ValueError(
                f"x is of the mesh {dict(mesh.shape)}, and the state given of "
                f"{dict(own.shape) or 'none'}: the function that jax.shard_map or jax.jit "
                "calls takes the state from around itself. Pass it as an argument, with "
                "in_specs=jax.P() in jax.shard_map; or, where nothing is compiled, put it "
                "there: jax.device_put(state, jax.NamedSharding(mesh, jax.P()))."
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
) -> Any:
    """Returns the memory at `index`; raises unless `approach` made it for so many channels."""
    try:
        memory = state.get(index)
    except KeyError:
        raise ValueError(
            "The state given holds nothing of this layer: it was made for another model. Make "
            "both together, `model, state = eqx.nn.make_with_state(Model)(...)`, and pass on "
            "the state that each call returns."
        ) from None
    check(memory, approach, channels)
    return memory


def check(memory: Any, approach: AbstractStrategy[Any], channels: int) -> None:
    """Raises `ValueError` unless `approach` made the memory for so many channels."""
    is_complex = any(map(jnp.iscomplexobj, jax.tree.leaves(memory)))
    dtype = statistics_dtype(complex if is_complex else float)
    expected = jax.eval_shape(lambda: approach.init(channels, dtype))
    if _shapes(memory) != _shapes(expected):
        form = eqx.tree_pformat(expected, struct_as_array=True)
        raise ValueError(
            f"The state given belongs to another layer. This one, with input_size={channels} "
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
        "Where only the cast state is left, this brings its dtype back, but not what rounding "
        f"has taken:\n{back}"
    )


def _shapes(tree: Any) -> tuple[Any, list[tuple[int, ...]]]:
    return jax.tree.structure(tree), [leaf.shape for leaf in jax.tree.leaves(tree)]
