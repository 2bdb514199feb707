"""Defines the formulas of y and of its gradients, for XLA's programs and for kernels."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from eqx_norm._jax.arithmetic import uncontracted
from eqx_norm._jax.jaxprs import elementwise_results

from .activation import Elementwise
from .reference import Shape

# A function that returns the mean of each row, in a shape that broadcasts to the rows.
Mean = Callable[[Array], Array]
Gradient = TypeVar("Gradient")  # an array, or its type
# A function that returns the product of two arrays.
Product = Callable[[Array, Array], Array]


class RowNorm(NamedTuple):
    r"""Holds the static arguments of a norm of rows. With $u = (x - \mu) r$ and $r = 1 /
    \sqrt{\sigma^2 + \varepsilon}$,

    $$y = f(w u + b), \quad dx = r \, \big(h - \overline{h} - u \, \overline{h u}\big), \quad
      h = w g, \quad g = f'(w u + b) \, dy, \quad dw = \sum g u, \quad db = \sum g.$$

    Unless `centred`, $\mu$ and $\overline{h}$ are 0. Arrays are in the compute dtype.
    """

    eps: float
    centred: bool
    activation: Elementwise | None = None

    def standardised(
        self, x: Float[Array, "*x"], k: Float[Array, "*#x"] | None, mean: Mean
    ) -> tuple[Float[Array, "*x"], Float[Array, "*#x"]]:
        """Returns u and r. `k` is one of a row's values, `None` unless `centred`."""
        if k is not None:
            x = self.centre(x, k, mean)
        return self.scaled(x, mean)

    def centre(
        self, x: Float[Array, "*x"], k: Float[Array, "*#x"], mean: Mean
    ) -> Float[Array, "*x"]:
        """Returns x - mean. As in `reference.statistics`, one of a row's values, `k`, is
        subtracted first, so that a constant row becomes 0, and the mean is computed twice."""
        d = x - (k + uncontracted(mean(x - k)))
        return d - uncontracted(mean(d))

    def scaled(
        self,
        x: Float[Array, "*x"],
        mean: Mean,
        rsqrt: Callable[[Array], Array] = lax.rsqrt,
    ) -> tuple[Float[Array, "*x"], Float[Array, "*#x"]]:
        """Returns u and r, for an x that is centred."""
        rstd = rsqrt(mean(x * x) + self.eps)
        return x * rstd, rstd

    def y(
        self,
        u: Float[Array, "*x"],
        weight: Float[Array, "*#x"],
        bias: Float[Array, "*#x"],
        product: Product = lax.mul,
    ) -> Float[Array, "*x"]:
        """Returns y, with each product that is added computed by this function."""
        v = product(u, weight) + bias
        if self.activation is None:
            return v
        return elementwise_results(self.activation.jaxpr, v, product=product)[0]

    def g(
        self,
        dy: Float[Array, "*x"],
        u: Float[Array, "*x"],
        weight: Float[Array, "*#x"],
        bias: Float[Array, "*#x"],
        product: Product = lax.mul,
        derivative_product: Product = lax.mul,
    ) -> Float[Array, "*x"]:
        """Returns g, with the derivative of the activation computed from u. `product` computes
        the product in $w u + b$, `derivative_product` those of the derivative."""
        if self.activation is None:
            return dy
        v = product(u, weight) + bias
        derivative = self.activation.derivative
        return elementwise_results(derivative, v, dy, product=derivative_product)[0]

    def jacobian_product(
        self,
        h: Float[Array, "*x"],
        u: Float[Array, "*x"],
        rstd: Float[Array, "*#x"],
        mean: Mean,
    ) -> Float[Array, "*x"]:
        """Returns dx, the product of du/dx and h. As the Jacobian is symmetric, this is also
        the tangent of u for a tangent h of x."""
        if self.centred:
            h = h - mean(h)
        return rstd * (h - u * mean(h * u))


class Options(NamedTuple):
    """Holds the static arguments of the primitives of `norm_primitives`, besides the layout.

    **Fields:**

    - `dtype`: the dtype of y.
    - `given`: whether the moments are operands that a strategy has chosen, and not those of x.
    - `kernel`: whether a Pallas kernel computes y and gradients.
    - `contiguous`: whether the values of an example are contiguous in memory.
    """

    norm: RowNorm
    dtype: jnp.dtype
    given: bool
    kernel: bool
    contiguous: bool = True


class Operands(NamedTuple):
    """Holds the operands of a norm, with as many axes as x, `(*mapped, *example)`, and size 1
    where they are broadcast.

    **Fields:** `mask`: one mask or none. `moments`: variance, and mean and mean_lo if there
    is a mean; empty if the moments of x are still to be computed.
    """

    x: Float[Array, "*x"]
    weight: Float[Array, "*#x"]
    bias: Float[Array, "*#x"]
    mask: Sequence[Bool[Array, "*#x"]] = ()
    moments: Sequence[Float[Array, "*#x"]] = ()

    @staticmethod
    def of(x: Array, weight: Array, bias: Array, others: Sequence[Array]) -> "Operands":
        """Returns the operands; `others` are moments, if any, and the mask, if any."""
        mask = [v for v in others if v.dtype == bool]
        moments = others[: len(others) - len(mask)]
        return Operands(x, weight, bias, mask, moments)


class Wanted(NamedTuple):
    """Says which gradients a backward pass returns besides that of x.

    **Fields:** `shape`: the shape of the gradients of weight and bias, `None` if neither is
    wanted. `moments_shape`: the shape of the gradients of given moments, `None` if they are not
    wanted. `x_dtype`: the dtype of the gradient of x.
    """

    shape: Shape | None = None
    weight: bool = False
    bias: bool = False
    moments_shape: Shape | None = None
    x_dtype: jnp.dtype = jnp.dtype(jnp.float32)

    def chosen(self, weight: Gradient, bias: Gradient) -> list[Gradient]:
        """Returns those of the two gradients, or of their types, that are wanted."""
        chosen = list[Gradient]()
        if self.weight:
            chosen.append(weight)
        if self.bias:
            chosen.append(bias)
        return chosen

    def with_shapes(self, change: Callable[[Shape], Shape]) -> "Wanted":
        """Returns the same gradients with changed shapes, for a new mapped axis or a shard."""
        shape, moments_shape = self.shape, self.moments_shape
        return self._replace(
            shape=None if shape is None else change(shape),
            moments_shape=None if moments_shape is None else change(moments_shape),
        )
