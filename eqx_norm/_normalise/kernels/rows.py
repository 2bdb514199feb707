"""Normalises rows with `implementation="pallas"`: a kernel for y, and one for the gradients."""

import functools
import math
from typing import Any, NamedTuple

from jaxtyping import Array

from eqx_norm._jax.collectives import AxisName
from eqx_norm._jax.jaxprs import equations
from eqx_norm._jax.lowering import Target
from eqx_norm._normalise.formulas.activation import Activation, Elementwise
from eqx_norm._normalise.formulas.layout import Layout
from eqx_norm._normalise.formulas.row_norm import Operands, RowNorm, Wanted

from .availability import kernels, platform, refusal

# The elementwise primitives that kernels compute on both platforms, and calls.
_NAMES = """
abs add add_any and broadcast_in_dim clamp convert_element_type cos custom_jvp_call div eq erf
exp exp2 ge gt integer_pow jit le log logistic lt max min mul ne neg not one_minus_square or
pjit reshard round rsqrt select_n sin sqrt square sub tanh xor
"""
_COMPUTED = frozenset(_NAMES.split())
_DTYPES = {"cuda": "float32 bfloat16 float16", "tpu": "float32 bfloat16"}


def check(
    x: Array,
    mask: Array | None,
    layout: Layout,
    axis_name: AxisName,
    activation: Activation | None,
    elementwise: Elementwise | None,
) -> None:
    """Raises `ValueError` if no kernel serves x, on any platform. `elementwise` is the
    activation, or `None` if it is not elementwise."""
    refused = functools.partial(refusal, x, axes="one example")
    if mask is not None:
        raise refused("no kernel takes a mask")
    if axis_name != ():
        raise refused(f"no kernel merges the moments of parts along axis_name={axis_name!r}")
    if layout.groups is None:
        raise refused(
            "a kernel normalises contiguous values, not those along the channels (axis=0)"
        )
    if activation is not None:
        if elementwise is None:
            raise refused(f"activation={activation} does not show that it is elementwise")
        found = equations(elementwise.derivative)
        if others := {equation.primitive.name for equation in found} - _COMPUTED:
            names = ", ".join(sorted(others))
            raise refused(f"no kernel computes {names}, which activation={activation} needs")


class Kernel(NamedTuple):
    """Computes y and gradients by the kernels of `module`."""

    module: Any
    layout: Layout
    norm: RowNorm

    @classmethod
    def of(
        cls, target: Target, layout: Layout, norm: RowNorm, at: Operands, wanted: Wanted
    ) -> "Kernel | None":
        """Returns the kernels for a platform, or `None` if passes serve: if x is empty, or
        weights differ between examples. Raises `ValueError` if no kernel serves."""
        name = platform(target, at.x, _DTYPES)
        if target.over[0]:
            raise refusal(
                at.x,
                "a kernel needs whole rows on each device, and the mesh splits the values of a "
                "row. Split the batch instead",
            )
        # A kernel takes one weight and one bias for all examples.
        shapes = at.weight.shape, at.bias.shape, wanted.shape
        mapped = [shape[: len(shape) - layout.ndim] for shape in shapes if shape is not None]
        if at.x.size == 0 or any(math.prod(sizes) > 1 for sizes in mapped):
            return None
        return cls(kernels("tpu_rows" if name == "tpu" else "gpu_rows"), layout, norm)

    def y(self, at: Operands) -> Array:
        """Returns the normalised x."""
        (y,) = self.module.forward(*self._rows(*at[:3]), norm=self.norm)
        return y

    def gradients(self, dy: Array, at: Operands, wanted: Wanted) -> list[Array]:
        """Returns the gradients of x and weights, as `choose.gradients` does. The
        moments are computed again."""
        shape = None if wanted.shape is None else self.layout.rows(wanted.shape)
        arrays = self._rows(dy, *at[:3])
        dx, *found = self.module.backward(*arrays, norm=self.norm, shape=shape)
        return [dx, *(wanted.chosen(*found) if found else [])]

    def _rows(self, *arrays: Array) -> list[Array]:
        return [array.reshape(self.layout.rows(array.shape)) for array in arrays]
