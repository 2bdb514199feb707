"""Defines the norm of a row and its derivative, for XLA's programs and for kernels."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax import lax
from jaxtyping import Array

from eqx_norm._jax.jaxprs import elementwise_results
from eqx_norm.strategies._pair import rounded

from .activation import Elementwise
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
    activation: Elementwise | None = None

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
        return elementwise_results(self.activation.jaxpr, v)[0]

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
        derivative, v = self.activation.derivative, u * weight + bias
        return elementwise_results(derivative, v, dy, product=product)[0]

    def along_x(self, h: Array, u: Array, rstd: Array, mean: Mean) -> Array:
        """Returns dx for h; as the map is symmetric, also the tangent of u for that of x."""
        h = h - mean(h) if self.centred else h
        return rstd * (h - u * mean(h * u))


class Operands(NamedTuple):
    """Holds the operands of a norm, with as many axes as x, `(*mapped, *example)`, and size 1
    where they are broadcast.

    **Fields:** `moments`: rstd, and the mean as a pair if there is one; if empty, x's own, to
    be computed. `given`: whether they are not those of x itself.
    """

    x: Array
    weight: Array
    bias: Array
    mask: Sequence[Array] = ()  # one mask or none
    moments: Sequence[Array] = ()
    given: bool = False


class Sums(NamedTuple):
    """Says which gradients of weights, and of given moments, a backward pass sums, if any, and
    their shapes."""

    shape: Shape | None = None
    of_weight: bool = False
    of_bias: bool = False
    moments_shape: Shape | None = None

    @property
    def any(self) -> bool:
        """Returns whether there are gradients of weights."""
        return self.of_weight or self.of_bias

    def chosen(self, weight: Array, bias: Array) -> list[Array]:
        """Returns those of the two gradients that are wanted."""
        return [weight] * self.of_weight + [bias] * self.of_bias
