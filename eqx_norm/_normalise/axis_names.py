"""Checks the axes that users name, and places a layer's state on their mesh; errors say what to
change in the user's code."""

from collections.abc import Hashable, Sequence

import jax
from jax import lax
from jaxtyping import Array, PyTree

from eqx_norm._jax import collectives
from eqx_norm._jax.collectives import AxisName, names_of, split
from eqx_norm._jax.lowering import device_axes

# Advice for an axis name that is not bound: to users of a batch norm, of its memory's axes, and
# of other norms.
_BATCH_ADVICE = (
    "In training the layer takes statistics over a mapped axis of that name, so map the model "
    "over its batch and name the axis:\n    {}(x, state)\n"
    "Or use the running statistics: eqx.nn.inference_mode(model)."
)
_MEMORY_ADVICE = (
    "In training the layer remembers one set of statistics for all batches along a mapped axis "
    "of that name, memory_axis_name=, so map over it, too:\n    {}(x, state)\n"
    "For a batch without that axis: eqx_norm.models.reconfigure(model, state, "
    "memory_axis_name=())."
)
_EXAMPLE_ADVICE = (
    "The layer merges moments along that axis, over which an example is split: so call it "
    "inside jax.shard_map over a mesh with the axis, or map it over the parts and name it:\n"
    "    {}(x)\nFor whole examples leave axis_name= out."
)


def size(
    axis_name: AxisName, memory_axis_name: AxisName = (), *, is_example_norm: bool = False
) -> int:
    """Returns the number of examples along the named axes, or of parts of one example. If a
    name is not bound, raises a `NameError` that says what to do, with a norm of examples if
    `is_example_norm`."""
    memory_names = names_of(memory_axis_name)
    names = names_of(axis_name) + memory_names
    for name in names:
        try:
            lax.axis_size(name)
        except NameError as error:
            if is_example_norm:
                advice = _EXAMPLE_ADVICE.format(_mapped("layer", names))
            else:
                advice = _MEMORY_ADVICE if name in memory_names else _BATCH_ADVICE
                axes = ", in_axes=(0, None), out_axes=(0, None)"
                advice = advice.format(_mapped("model", names, axes))
            if len(names) > 1:
                advice += " (A vmap binds one name, not those of a tuple.)"
            raise NameError(
                f"The axis name {name!r} is not bound ({error}). {advice}"
            ) from None
        except Exception as error:  # JAX's, for a size that is a symbol of jax.export
            raise ValueError(
                f"The axis {name!r} has no size that is a number, which training needs. Export "
                "inference, eqx.nn.inference_mode(model), or training for one size of a batch."
            ) from error
    return collectives.size(names)


def _mapped(call: str, names: Sequence[Hashable], axes: str = "") -> str:
    """Returns the code that maps a function over the named axes."""
    for name in names:
        call = f"jax.vmap({call}, axis_name={name!r}{axes})"
    return call


def check_shared(before: PyTree, after: PyTree, axis_name: AxisName) -> None:
    """Raises `ValueError` if the types say that `after` varies over devices and `before` does
    not. With `shard_map(check_vma=False)` types do not say this, and nothing is checked."""
    new_axes = _device_axes(after) - _device_axes(before)
    if not new_axes:
        return
    axes = tuple(sorted(new_axes, key=str))
    names = names_of(axis_name)
    raise ValueError(
        f"The statistics over axis_name={axis_name!r} differ from device to device along "
        f"{axes}, but all devices share the state given. For statistics over all devices, "
        f"make the layer with axis_name={(*names, *axes)!r}. To normalise by each device's "
        f"own and share running statistics, with memory_axis_name={axes!r}. For separate "
        "running statistics, stack one state per device, pass the stack with "
        f"in_specs=P({axes!r}), and take its [0] inside."
    )


def _device_axes(tree: PyTree) -> frozenset[Hashable]:
    """Returns the mesh axes over which an array of the pytree varies."""
    return frozenset[Hashable]().union(*map(device_axes, jax.tree.leaves(tree)))


def replicated(state: PyTree) -> PyTree:
    """Returns the state, replicated over the explicit axes of a mesh."""
    return jax.tree.map(lambda array: split(array, jax.P()), state)


def placed_as(before: PyTree, after: PyTree) -> PyTree:
    """Returns `after`, split over a mesh as `before` is; raises `ValueError` if the two are on
    different meshes, which happens if `before` is not an argument of the program. (The
    error of `eqx.nn.State` would say only that "f32[4]" is not "f32[4]".)"""

    def placed(old: Array, new: Array) -> Array:
        sharding, mesh = jax.typeof(old).sharding, jax.typeof(new).sharding.mesh
        if sharding.mesh != mesh and (mesh.explicit_axes or mesh.manual_axes):
            raise ValueError(
                f"x is on the mesh {dict(mesh.shape)}, but the state given is on "
                f"{dict(sharding.mesh.shape) or 'no mesh'}: the function in jax.shard_map or "
                "jax.jit closes over the state. Pass the state as an argument, in "
                "jax.shard_map with in_specs=jax.P(); or, without jit, move it to the mesh: "
                "jax.device_put(state, jax.NamedSharding(mesh, jax.P()))."
            )
        return split(new, sharding.spec)

    return jax.tree.map(placed, before, after)
