"""Chooses, for each pass over x, the form that is fast on the target platform. All forms
compute the formulas of `formulas.reference`."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from eqx_norm._jax import collectives
from eqx_norm._jax.lowering import Target
from eqx_norm._normalise.formulas import reference
from eqx_norm._normalise.formulas.layout import Layout
from eqx_norm._normalise.formulas.reference import Shape
from eqx_norm._normalise.kernels import columns

from . import on_cpu, on_gpu


def statistics(
    target: Target,
    x: Array,
    *mask: Array,
    layout: Layout,
    shape: Shape,
    centred: bool,
    implementation: str = "auto",
    written: bool = True,
) -> Sequence[Array]:
    """Computes `reference.statistics`; unless `centred`, count and sum of squares alone. On a CPU
    the results are `written` to memory, for passes that read them several times."""
    if not centred:
        return _squares(target, x, *mask, layout=layout, shape=shape)
    found = _statistics(target, x, *mask, layout=layout, shape=shape, kind=implementation)
    if written and target.own_sums == "cpu" and implementation != "pallas":
        count, *vectors = found
        found = [count, *on_cpu.written(*vectors)]
    over = target.over[0]
    return collectives.pooled_over(found, over) if over else found


def _squares(
    target: Target, x: Array, *mask: Array, layout: Layout, shape: Shape
) -> Sequence[Array]:
    own = (*x.shape[: x.ndim - layout.ndim], *layout.moments_shape)
    is_of_rows = layout.groups is not None and shape == own
    if target.own_sums == "cpu" and is_of_rows and not mask and layout.length <= on_cpu.UNCUT:
        (m2,) = summed_over([on_cpu.squares(layout.in_rows(x))], target.over[0])
    else:
        zero = jnp.zeros((1,) * x.ndim, reference.compute_dtype(x.dtype))
        wide = reference.widened(small(target, x))
        (m2,) = sums(
            target, wide, x, zero, zero, *mask, layout=layout, shape=shape, both=False
        )
    return [jnp.broadcast_to(count(target, x, mask, shape), shape), m2]


def count(target: Target, x: Array, mask: Sequence[Array], shape: Shape) -> Array:
    """Returns the number of values in each group, for x and mask in a shape with an axis for
    the groups, if there are several."""
    axes, over = reference.summed_axes(x.shape, shape), target.over[0]
    found = reference.counts(reference.widened(x), mask[0] if mask else None, axes)
    if mask:
        return summed_over([found], over)[0]
    return found * lax.axis_size(over) if over else found


def small(target: Target, x: Array, *, once: bool = False) -> Array:
    """Returns x, in float32 if that is faster."""
    return on_cpu.converted(x, once=once) if target.platform == "cpu" else x


def _statistics(
    target: Target, x: Array, *mask: Array, layout: Layout, shape: Shape, kind: str
) -> Sequence[Array]:
    has_kernel = kind == "pallas"
    if has_kernel or target.own_sums == "cpu":
        flat, shape = [*map(layout.in_rows, (x, *mask))], layout.rows(shape)
        if has_kernel:
            return columns.statistics(target, *flat, shape=shape)
        return on_cpu.statistics(*flat, shape=shape)
    k = _first(target, x, *mask, layout=layout, shape=shape)
    arrays, shape = [a.reshape(layout.cut(a.shape)) for a in (x, *mask)], layout.cut(shape)
    reduction = on_gpu.cut_sums if target.own_sums == "gpu" else reference.xla_sums
    k = k.reshape(shape)
    return reference.statistics(*arrays, shape=shape, reduction=reduction, k=k)


def _first(target: Target, x: Array, *mask: Array, layout: Layout, shape: Shape) -> Array:
    """Returns k of `reference.statistics`, from x in the caller's shape and dtype, because
    XLA:TPU would write all of x to memory in any other. The largest value takes a pass over x,
    but no gather, for which XLA:TPU would copy x and devices would send x."""
    if target.is_partitioned:
        mapped = x.ndim - layout.inner
        examples = reference.summed_axes(x.shape[:mapped], shape[:mapped])
        if examples and not mask:
            # k is the largest of the first values on each device, because XLA may send x to
            # other devices to slice one example.
            k = reference.first_value(x, shape=(*x.shape[:mapped], *shape[mapped:]))
            for axis in examples:
                k = _first_on_each(target.devices, k, axis)
            k = k.max(examples, keepdims=True)
        else:
            k = reference.first_value(x, *mask, shape=shape, largest=True)
        # The barrier makes k whole on each device; without it XLA reduces k for each reader.
        return lax.optimization_barrier(k.reshape(-1))
    if mask and target.platform == "gpu":
        arrays, shape = [*map(layout.in_rows, (x, *mask))], layout.rows(shape)
        return reference.first_value(*arrays, shape=shape)  # one gather for all axes
    sizes = [n for m in mask for n, kept in zip(m.shape, shape, strict=True) if kept != 1]
    differs = any(n != 1 for n in sizes)  # between examples
    return reference.first_value(x, *mask, shape=shape, largest=differs)


def _first_on_each(devices: int, x: Array, axis: int) -> Array:
    """Returns the first index of each of as many parts of an axis as there are devices; x
    itself if the axis has no such parts."""
    n = x.shape[axis]
    if not isinstance(n, int) or n % devices:
        return x
    parts = x.reshape(*x.shape[:axis], devices, n // devices, *x.shape[axis + 1 :])
    return lax.index_in_dim(parts, 0, axis + 1, keepdims=False)


def sums(
    target: Target, g: Array, *arrays: Array, layout: Layout, shape: Shape, both: bool
) -> Sequence[Array]:
    """Computes `reference.sums`."""
    arranged, shape = _arranged(target, layout, g, *arrays), _shape(target, layout, shape)
    sums = reference.sums(*arranged, shape=shape, both=both, reduction=reduction(target))
    return summed_over(sums, target.over[0])


def reduction(target: Target) -> reference.Reduction:
    """Returns the form of sums in a backward pass."""
    own = {"cpu": on_cpu.tree_sums, "gpu": on_gpu.packed_sums}
    own_sums = own.get(target.own_sums, reference.xla_sums)

    def sums(arrays: Sequence[Array], axes: Sequence[int]) -> tuple[Array, ...]:
        is_known = all(isinstance(arrays[0].shape[axis], int) for axis in axes)
        return (own_sums if is_known else reference.xla_sums)(arrays, axes)

    return sums


def summed_over(sums: Sequence[Array], axes: tuple[str, ...]) -> Sequence[Array]:
    """Returns the sums over all devices along the mesh axes."""
    # One by one: stacking would write the gradients of weights, as long as a row, once more.
    return lax.psum(list(sums), axes) if axes else sums


def affine(
    target: Target, bias: Array, scale: Array, wide: Array, *arrays: Array, layout: Layout
) -> list[Array]:
    """Computes `reference.affine`."""
    x, *centre = arrays
    del wide
    x, bias, scale, *centre = _arranged(target, layout, x, bias, scale, *centre)
    return [reference.affine(bias, scale, x, *centre)]


def _arranged(target: Target, layout: Layout, *arrays: Array) -> list[Array]:
    """Returns arrays in the shape that suits the platform."""
    if target.platform == "cpu":
        return [*map(layout.in_rows, arrays)]
    return [a.reshape(layout.cut(a.shape)) for a in arrays]


def _shape(target: Target, layout: Layout, shape: Shape) -> Shape:
    return layout.rows(shape) if target.platform == "cpu" else layout.cut(shape)
