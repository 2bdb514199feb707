"""Defines `Variant`, which says how passes over x differ by platform."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxtyping import Array, Float, Inexact, Shaped

from eqx_norm._normalise.formulas import reference
from eqx_norm._normalise.formulas.layout import Layout
from eqx_norm._normalise.formulas.reference import Reduction, Shape


def _unchanged(x: Inexact[Array, "*x"], *, is_read_once: bool = False) -> Inexact[Array, "*x"]:
    del is_read_once
    return x


class Variant(NamedTuple):
    """Says what passes do differently on a platform. The defaults are those of a TPU.

    **Fields:**

    - `is_flat`: whether arrays are in rows, `Layout.rows`, because XLA:CPU loops over each
        axis; otherwise they are in the caller's shape.
    - `gradients_reduction`: the reduction of a backward pass.
    - `statistics_reduction`: the reduction of `reference.statistics`.
    - `statistics`: computes count, mean, m2 and mean_lo; `None` for `reference.statistics`.
    - `squares`: sums the squares of long rows; `None` for a pass of `dot_products`, by which
        `RMSNorm` takes 1.1 to 1.6 times as long on a CPU in bfloat16.
    - `is_first_in_rows`: whether the first unmasked value is found in rows, by one gather.
    - `convert_small`: converts a small array of half precision once: XLA:CPU wakes threads for
        each loop that converts, which takes longer than the loop (without: 1.39 times the
        time).
    - `materialised`: materialises vectors that several loops read.
    - `uncontracted`: keeps LLVM from fusing a product with a sum: it does so in some loops
        only, and a row would not have one result.
    - `has_barriers`: whether barriers keep XLA from storing x - mean and an activation's
        derivative between passes. XLA:CPU removes barriers before it fuses (jax 0.10.2), or
        writes what is behind them in a loop of its own (0.12.0.1).
    - `rsqrt`: computes 1 / sqrt. `reference.reciprocal_sqrt` says why a CPU needs its own.
    """

    is_flat: bool = False
    gradients_reduction: Reduction = reference.xla_sums
    statistics_reduction: Reduction = reference.xla_sums
    statistics: Callable[..., Sequence[Array]] | None = None
    squares: Callable[[Array], Array] | None = None
    is_first_in_rows: bool = False
    convert_small: Callable[..., Array] = _unchanged
    materialised: Callable[..., Sequence[Array]] = lambda *arrays: arrays
    uncontracted: Callable[[Array], Array] = lambda product: product
    has_barriers: bool = False
    rsqrt: Callable[[Array], Array] = reference.hardware_rsqrt

    def reduced(
        self, arrays: Sequence[Float[Array, "*x"]], axes: Sequence[int]
    ) -> tuple[Float[Array, "*sums"], ...]:
        """Returns the sums of a backward pass."""
        is_known = all(isinstance(arrays[0].shape[axis], int) for axis in axes)
        reduction = self.gradients_reduction if is_known else reference.xla_sums
        return reduction(arrays, axes)

    def arranged(
        self, layout: Layout, *arrays: Shaped[Array, "..."], by_channel: bool = False
    ) -> list[Shaped[Array, "..."]]:
        """Returns arrays in the shape of this variant."""
        if self.is_flat:
            return [layout.in_rows(a, by_channel=by_channel) for a in arrays]
        return [a.reshape(layout.cut(a.shape)) for a in arrays]

    def shape(self, layout: Layout, shape: Shape, *, by_channel: bool = False) -> Shape:
        """Returns the shape of this variant for an array of the caller's `shape`."""
        if self.is_flat:
            return layout.rows(shape, by_channel=by_channel)
        return layout.cut(shape)
