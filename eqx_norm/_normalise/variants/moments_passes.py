"""Computes the passes of `moments_primitives` by XLA's programs, in the variant that `choose`
chooses."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Shaped

from eqx_norm._jax.lowering import Target
from eqx_norm._normalise.formulas import merge, reference
from eqx_norm._normalise.formulas.layout import Layout
from eqx_norm._normalise.formulas.reference import Shape

from .on_cpu import SHORT_ROW, UNCUT
from .part import first_on_each, part_of
from .variant import Variant


def statistics(
    variant: Variant,
    target: Target,
    x: Float[Array, "*x"],
    *mask: Bool[Array, "*#x"],
    layout: Layout,
    shape: Shape,
    centred: bool,
) -> Sequence[Float[Array, "..."]]:
    """Computes `reference.statistics` of a device's x; unless `centred`, count and sum of
    squares, over all devices."""
    if not centred:
        return _squares(variant, target, x, *mask, layout=layout, shape=shape)
    if variant.statistics is not None:
        arrays = variant.arranged(layout, x, *mask)
        return variant.statistics(*arrays, shape=variant.shape(layout, shape))
    k = _one_value(variant, target, x, *mask, layout=layout, shape=shape)
    part = x
    # A mask could leave few values of a part, or none. `Layout.in_rows` takes no part.
    if not mask and not variant.is_flat:
        # In the caller's shape, for XLA:TPU would copy x to cut it into groups first.
        part = part_of(x, shape, target.devices)
    part, *arrays = variant.arranged(layout, part, x, *mask)
    shape = variant.shape(layout, shape)
    return reference.statistics(
        *arrays,
        shape=shape,
        reduction=variant.statistics_reduction,
        k=k.reshape(shape),
        part=part,
    )


def _squares(
    variant: Variant,
    target: Target,
    x: Float[Array, "*x"],
    *mask: Bool[Array, "*#x"],
    layout: Layout,
    shape: Shape,
) -> list[Float[Array, "..."]]:
    squares = variant.squares
    is_of_rows = layout.groups is not None and shape == layout.own_shape(x.shape)
    if squares is not None and is_of_rows and not mask and SHORT_ROW < layout.length <= UNCUT:
        (m2,) = summed_over([squares(layout.in_rows(x))], target.over[0])
    else:
        zero = jnp.zeros((1,) * x.ndim, reference.compute_dtype(x.dtype))
        g = reference.upcast(variant.convert_small(x))
        (m2,) = dot_products(
            variant, target, g, x, zero, zero, *mask, layout=layout, shape=shape, both=False
        )
    return [jnp.broadcast_to(count(target, x, mask, shape), shape), m2]


def count(
    target: Target,
    x: Float[Array, "*x"],
    mask: Sequence[Bool[Array, "*#x"]],
    shape: Shape,
) -> Float[Array, "..."]:
    """Returns the number of values in each group, for x and mask in a shape with an axis for
    the groups, if there are several; without a mask, a constant."""
    axes, over = reference.summed_axes(x.shape, shape), target.over[0]
    found = reference.counts(reference.upcast(x), mask[0] if mask else None, axes)
    if mask:
        return summed_over([found], over)[0]
    if over:
        return found * lax.axis_size(over)
    return found


def pooled(
    target: Target, found: Sequence[Float[Array, "*vectors"]]
) -> Sequence[Float[Array, "*vectors"]]:
    """Returns count, mean, m2 and mean_lo, merged over devices."""
    over = target.over[0]
    return merge.merged_over_devices(found, over) if over else found


def _one_value(
    variant: Variant,
    target: Target,
    x: Float[Array, "*x"],
    *mask: Bool[Array, "*#x"],
    layout: Layout,
    shape: Shape,
) -> Float[Array, "..."]:
    """Returns k of `reference.statistics`, from x in the caller's shape and dtype, because
    XLA:TPU would write all of x to memory in any other."""
    if target.is_partitioned:
        k = _one_value_of_devices(target, x, *mask, layout=layout, shape=shape)
        # The barrier makes k whole on each device; without it XLA reduces k for each reader.
        return lax.optimization_barrier(k.reshape(-1))
    if not mask:
        return reference.first_value(x, shape=shape)
    if variant.is_first_in_rows:
        x, rows_mask = layout.in_rows(x), layout.in_rows(mask[0])
        # One gather for all axes.
        return reference.first_value(x, rows_mask, shape=layout.rows(shape))
    kept = zip(mask[0].shape, shape, strict=True)
    if any(n != 1 and size != 1 for n, size in kept):  # examples have masks of their own
        # The largest value takes a pass over x. The first takes a gather, for which XLA:TPU
        # would copy x.
        return reference.largest_value(x, mask[0], shape=shape)
    return reference.first_value(x, mask[0], shape=shape)


def _one_value_of_devices(
    target: Target,
    x: Float[Array, "*x"],
    *mask: Bool[Array, "*#x"],
    layout: Layout,
    shape: Shape,
) -> Float[Array, "..."]:
    """Returns k in a program that XLA splits. No value is gathered, because devices would send
    x for a gather, or to slice one example."""
    if mask:
        return reference.largest_value(x, mask[0], shape=shape)
    mapped = x.ndim - layout.inner
    examples = reference.summed_axes(x.shape[:mapped], shape[:mapped])
    if not examples:
        return reference.first_value(x, shape=shape)
    # The largest of the first values on each device.
    k = reference.first_value(x, shape=(*x.shape[:mapped], *shape[mapped:]))
    for axis in examples:
        k = first_on_each(target.devices, k, axis)
    return k.max(examples, keepdims=True)


def dot_products(
    variant: Variant,
    target: Target,
    g: Float[Array, "*x"],
    *arrays: Shaped[Array, "..."],
    layout: Layout,
    shape: Shape,
    both: bool,
) -> Sequence[Float[Array, "..."]]:
    """Computes `reference.dot_products`; `arrays` are x, mean, mean_lo and any mask."""
    arranged = variant.arranged(layout, g, *arrays)
    shape = variant.shape(layout, shape)
    sums = reference.dot_products(*arranged, shape=shape, both=both, reduction=variant.reduced)
    return summed_over(sums, target.over[0])


def summed_over(
    sums: Sequence[Float[Array, "..."]], axes: tuple[str, ...]
) -> Sequence[Float[Array, "..."]]:
    """Returns the sums over all devices along the mesh axes."""
    if not axes:
        return sums
    # One by one: stacking would write the gradients of weights, as long as a row, once more.
    return lax.psum(list(sums), axes)


def affine(
    variant: Variant,
    bias: Float[Array, "*#vectors"],
    scale: Float[Array, "*#vectors"],
    x: Float[Array, "*x"],
    *arrays: Shaped[Array, "..."],
    layout: Layout,
) -> list[Float[Array, "..."]]:
    """Computes `reference.affine`; `arrays` are mean, mean_lo and any mask."""
    x, bias, scale, *centre = variant.arranged(layout, x, bias, scale, *arrays)
    return [reference.affine(bias, scale, x, *centre)]
