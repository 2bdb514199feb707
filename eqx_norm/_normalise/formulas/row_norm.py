"""Defines the norm of a row and its derivative, for XLA's programs and for kernels."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax
from jaxtyping import Array

from eqx_norm._jax.jaxprs import in_kernel
from eqx_norm.strategies._pair import rounded

from .activation import Activation, applied
from .reference import Shape

# A function that returns the mean of each row, in a shape that broadcasts to the rows.
Mean = Callable[[Array], Array]


class RowNorm(NamedTuple):
    r"""Holds the static arguments of a norm of rows. With $u = (x - \mu) r$ and $r = 1 /
    \sqrt{\sigma^2 + \varepsilon}$,

    $$y = f(w u + b), \quad dx = r \, \big(h - \overline{h} - u \, \overline{h u}\big), \quad
      h = w g, \quad g = f'(w u + b) \, dy, \quad dw = \sum g u, \quad db = \sum g.$$

    Unless `centred`, $\mu$ and $\overline{h}$ are 0. All arrays are float32.
    """

    eps: float
    centred: bool
    activation: Activation | None = None

    def standardised(self, x: Array, k: Any, mean: Mean) -> tuple[Array, Array]:
        """Returns u and r."""
        return self.scaled(self.centre(x, k, mean) if self.centred else x, mean)

    def centre(self, x: Array, k: Any, mean: Mean) -> Array:
        """Returns x - mean. As in `reference.statistics`, one of a row's values, `k`, is
        subtracted first, so that a constant row becomes 0, and the mean is computed twice."""
        d = x - (k + rounded(mean(x - k)))
        return d - rounded(mean(d))

    def scaled(
        self, x: Array, mean: Mean, rsqrt: Callable[[Array], Array] = lax.rsqrt
    ) -> tuple[Array, Array]:
        """Returns u and r, for an x that is centred."""
        rstd = rsqrt(mean(x * x) + self.eps)
        return x * rstd, rstd

    def y(self, u: Array, weight: Array, bias: Array) -> Array:
        """Returns y."""
        v = u * weight + bias
        if self.activation is None:
            return v
        function = functools.partial(applied, self.activation)
        return in_kernel(jax.make_jaxpr(function)(_like(v)), v)[0]

    def g(
        self,
        dy: Array,
        u: Array,
        weight: Array,
        bias: Array,
        product: Callable[[Array, Array], Array] = lax.mul,
    ) -> Array:
        """Returns g, with the derivative of the activation computed from u, and each `product`
        in it by this function."""
        if self.activation is None:
            return dy
        along = self.derivative(_like(u))
        return in_kernel(along, u * weight + bias, dy, product=product)[0]

    def derivative(self, like: jax.ShapeDtypeStruct) -> Any:
        """Returns the jaxpr that computes the activation's tangent from v and its tangent."""
        function = functools.partial(applied, self.activation)
        return jax.make_jaxpr(lambda v, dv: jax.jvp(function, (v,), (dv,))[1])(like, like)

    def along_x(self, h: Array, u: Array, rstd: Array, mean: Mean) -> Array:
        """Returns dx for h; as the map is symmetric, also the tangent of u for that of x."""
        h = h - mean(h) if self.centred else h
        return rstd * (h - u * mean(h * u))


class Operands(NamedTuple):
    """Holds the operands of norms of examples, with as many axes as x, `(*mapped, *example)`,
    and size 1 where they are broadcast."""

    x: Array
    weight: Array
    bias: Array
    mask: tuple[Array, ...] = ()  # one mask or none


class Sums(NamedTuple):
    """Says which gradients of weights a backward pass sums, if any, and their shape."""

    shape: Shape = ()
    of_weight: bool = False
    of_bias: bool = False

    @property
    def any(self) -> bool:
        """Returns whether there are any."""
        return self.of_weight or self.of_bias

    def chosen(self, weight: Array, bias: Array) -> list[Array]:
        """Returns those of the two gradients that are wanted."""
        return [weight] * self.of_weight + [bias] * self.of_bias


def _like(array: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)
