"""Normalises rows with `implementation="pallas"`: a kernel for y, and one for the gradients."""

import functools
import math
from types import ModuleType
from typing import NamedTuple

from jaxtyping import Array, Bool, Float

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
_DTYPES = {"cuda": ("float32", "bfloat16", "float16"), "tpu": ("float32", "bfloat16")}


def check(
    x: Array,
    mask: Bool[Array, "..."] | None,
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
    if activation is None:
        return
    if elementwise is None:
        raise refused(f"activation={activation} does not show that it is elementwise")
    needed = {equation.primitive.name for equation in equations(elementwise.derivative)}
    missing = needed - _COMPUTED
    if missing:
        names = ", ".join(sorted(missing))
        raise refused(f"no kernel computes {names}, which activation={activation} needs")


class Kernel(NamedTuple):
    """Computes y and gradients by the kernels of `module`, `gpu_rows` or `tpu_rows`."""

    module: ModuleType
    layout: Layout
    norm: RowNorm

    @classmethod
    def of(
        cls, target: Target, layout: Layout, norm: RowNorm, operands: Operands, wanted: Wanted
    ) -> "Kernel | None":
        """Returns the kernels for a platform, or `None` if passes serve: if x is empty, or
        weights differ between examples. Raises `ValueError` if no kernel serves."""
        x = operands.x
        name = platform(target, x, _DTYPES)
        if target.over[0]:
            raise refusal(
                x,
                "a kernel needs whole rows on each device, and the mesh splits the values of a "
                "row. Split the batch instead",
            )
        if x.size == 0:
            return None
        shapes = [operands.weight.shape, operands.bias.shape]
        if wanted.shape is not None:
            shapes.append(wanted.shape)
        for shape in shapes:
            mapped = shape[: len(shape) - layout.ndim]
            if math.prod(mapped) > 1:  # a kernel takes one weight and bias for all examples
                return None
        return cls(kernels("tpu_rows" if name == "tpu" else "gpu_rows"), layout, norm)

    def y(self, operands: Operands) -> Float[Array, "*mapped groups n"]:
        """Returns the normalised x."""
        x, weight, bias = self._in_rows(operands)
        (y,) = self.module.forward(x, weight, bias, norm=self.norm)
        return y

    def gradients(
        self, dy: Float[Array, "..."], operands: Operands, wanted: Wanted
    ) -> list[Float[Array, "..."]]:
        """Returns the gradients of x and weights, as `choose.gradients` does. The
        moments are computed again."""
        x, weight, bias = self._in_rows(operands)
        dy = dy.reshape(x.shape)
        if wanted.shape is None:
            return self.module.backward(dy, x, weight, bias, norm=self.norm)
        shape = self.layout.rows(wanted.shape)
        dx, dweight, dbias = self.module.backward(
            dy, x, weight, bias, norm=self.norm, shape=shape
        )
        return [dx, *wanted.chosen(dweight, dbias)]

    def _in_rows(self, operands: Operands) -> list[Float[Array, "..."]]:
        """Returns x, weight and bias as `(*mapped, groups, values)`."""
        arrays = operands.x, operands.weight, operands.bias
        return [array.reshape(self.layout.rows(array.shape)) for array in arrays]
