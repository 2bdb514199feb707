"""Computes statistics, sums and affine maps of x by XLA's programs, in the variant that
`choose` chooses."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from eqx_norm._jax.lowering import Target
from eqx_norm._normalise.formulas import merge, reference
from eqx_norm._normalise.formulas.layout import Layout
from eqx_norm._normalise.formulas.reference import Reduction, Shape

from .on_cpu import UNCUT


def _unchanged(x: Array, *, once: bool = False) -> Array:
    del once
    return x


class Variant(NamedTuple):
    """Says what passes do differently on a platform. The defaults are those of a TPU.

    **Fields:**

    - `is_flat`: whether arrays are in rows, `Layout.rows`, because XLA:CPU loops over each
        axis; otherwise they are in the caller's shape.
    - `sums`: the reduction of a backward pass.
    - `statistic_sums`: the reduction of `reference.statistics`.
    - `statistics`: computes count, mean, m2 and mean_rest; `None` for `reference.statistics`.
    - `squares`: sums the squares of rows; `None` for a pass of `sums`, by which `RMSNorm` takes
        1.1 to 1.6 times as long on a CPU in bfloat16.
    - `is_first_in_rows`: whether the first unmasked value is found in rows, by one gather.
    - `small`: converts a small array of half precision once: XLA:CPU wakes threads for each
        loop that converts, which takes longer than the loop (without: 1.39 times the time).
    - `materialised`: materialises vectors that several loops read.
    - `uncontracted`: keeps LLVM from fusing a product with a sum: it does so in some loops
        only, and a row would not have one result.
    - `has_barriers`: whether barriers keep XLA from storing x - mean and an activation's
        derivative between passes. XLA:CPU removes barriers before it fuses.
    - `rsqrt`: computes 1 / sqrt: `reference.rsqrt` says why not by the hardware on a CPU.
    """

    is_flat: bool = False
    sums: Reduction = reference.xla_sums
    statistic_sums: Reduction = reference.xla_sums
    statistics: Callable[..., Sequence[Array]] | None = None
    squares: Callable[[Array], Array] | None = None
    is_first_in_rows: bool = False
    small: Callable[..., Array] = _unchanged
    materialised: Callable[..., Sequence[Array]] = lambda *arrays: arrays
    uncontracted: Callable[[Array], Array] = lambda product: product
    has_barriers: bool = False
    rsqrt: Callable[[Array], Array] = reference.hardware_rsqrt

    def reduced(self, arrays: Sequence[Array], axes: Sequence[int]) -> tuple[Array, ...]:
        """Returns the sums of a backward pass."""
        is_known = all(isinstance(arrays[0].shape[axis], int) for axis in axes)
        return (self.sums if is_known else reference.xla_sums)(arrays, axes)

    def arranged(self, layout: Layout, *arrays: Array, by_channel: bool = False) -> list[Array]:
        """Returns arrays in the shape of this variant."""
        if self.is_flat:
            return [layout.in_rows(a, by_channel=by_channel) for a in arrays]
        return [a.reshape(layout.cut(a.shape)) for a in arrays]

    def shape(self, layout: Layout, shape: Shape, *, by_channel: bool = False) -> Shape:
        """Returns that shape for an array of this one."""
        return layout.rows(shape, by_channel=by_channel) if self.is_flat else layout.cut(shape)


def statistics(
    variant: Variant,
    target: Target,
    x: Array,
    *mask: Array,
    layout: Layout,
    shape: Shape,
    centred: bool,
) -> Sequence[Array]:
    """Computes `reference.statistics` of a device's x; unless `centred`, count and sum of
    squares, over all devices."""
    if not centred:
        return _squares(variant, target, x, *mask, layout=layout, shape=shape)
    if variant.statistics is not None:
        arrays = variant.arranged(layout, x, *mask)
        return variant.statistics(*arrays, shape=variant.shape(layout, shape))
    k = _first(variant, target, x, *mask, layout=layout, shape=shape)
    arrays, shape = variant.arranged(layout, x, *mask), variant.shape(layout, shape)
    sums, k = variant.statistic_sums, k.reshape(shape)
    return reference.statistics(*arrays, shape=shape, reduction=sums, k=k)


def _squares(
    variant: Variant, target: Target, x: Array, *mask: Array, layout: Layout, shape: Shape
) -> Sequence[Array]:
    squares, is_of_rows = variant.squares, shape == layout.own_shape(x.shape)
    is_of_groups = layout.groups is not None and is_of_rows and not mask
    if squares is not None and is_of_groups and layout.length <= UNCUT:
        (m2,) = summed_over([squares(layout.in_rows(x))], target.over[0])
    else:
        zero = jnp.zeros((1,) * x.ndim, reference.compute_dtype(x.dtype))
        arrays = reference.upcast(variant.small(x)), x, zero, zero, *mask
        (m2,) = sums(variant, target, *arrays, layout=layout, shape=shape, both=False)
    return [jnp.broadcast_to(count(target, x, mask, shape), shape), m2]


def count(target: Target, x: Array, mask: Sequence[Array], shape: Shape) -> Array:
    """Returns the number of values in each group, for x and mask in a shape with an axis for
    the groups, if there are several; without a mask, a constant."""
    axes, over = reference.summed_axes(x.shape, shape), target.over[0]
    found = reference.counts(reference.upcast(x), mask[0] if mask else None, axes)
    if mask:
        return summed_over([found], over)[0]
    return found * lax.axis_size(over) if over else found


def pooled(target: Target, found: Sequence[Array]) -> Sequence[Array]:
    """Returns count, mean, m2 and mean_rest, merged over devices."""
    over = target.over[0]
    return merge.merged_over_devices(found, over) if over else found


def _first(
    variant: Variant, target: Target, x: Array, *mask: Array, layout: Layout, shape: Shape
) -> Array:
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
    if mask and variant.is_first_in_rows:
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
    variant: Variant,
    target: Target,
    g: Array,
    *arrays: Array,
    layout: Layout,
    shape: Shape,
    both: bool,
) -> Sequence[Array]:
    """Computes `reference.sums`."""
    arranged, shape = variant.arranged(layout, g, *arrays), variant.shape(layout, shape)
    sums = reference.sums(*arranged, shape=shape, both=both, reduction=variant.reduced)
    return summed_over(sums, target.over[0])


def summed_over(sums: Sequence[Array], axes: tuple[str, ...]) -> Sequence[Array]:
    """Returns the sums over all devices along the mesh axes."""
    # One by one: stacking would write the gradients of weights, as long as a row, once more.
    return lax.psum(list(sums), axes) if axes else sums


def affine(
    variant: Variant, bias: Array, scale: Array, x_upcast: Array, *arrays: Array, layout: Layout
) -> list[Array]:
    """Computes `reference.affine`."""
    del x_upcast
    x, *centre = arrays
    x, bias, scale, *centre = variant.arranged(layout, x, bias, scale, *centre)
    return [reference.affine(bias, scale, x, *centre)]
