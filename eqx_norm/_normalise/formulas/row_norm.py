"""Defines the formulas of y and of its gradients, for XLA's programs and for kernels."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from jax import lax
from jaxtyping import Array

from eqx_norm._jax.arithmetic import uncontracted
from eqx_norm._jax.jaxprs import elementwise_results

from .activation import Elementwise
from .reference import Shape

# A function that returns the mean of each row, in a shape that broadcasts to the rows.
Mean = Callable[[Array], Array]
Gradient = TypeVar("Gradient")  # an array, or its type
# A function that returns the product of two arrays.
Product = Callable[[Any, Any], Array]


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
        d = x - (k + uncontracted(mean(x - k)))
        return d - uncontracted(mean(d))

    def scaled(
        self, x: Array, mean: Mean, rsqrt: Callable[[Array], Array] = lax.rsqrt
    ) -> tuple[Array, Array]:
        """Returns u and r, for an x that is centred."""
        rstd = rsqrt(mean(x * x) + self.eps)
        return x * rstd, rstd

    def y(self, u: Array, weight: Array, bias: Array, product: Product = lax.mul) -> Array:
        """Returns y, with each product that is added computed by this function."""
        v = product(u, weight) + bias
        if self.activation is None:
            return v
        return elementwise_results(self.activation.jaxpr, v, product=product)[0]

    def g(
        self,
        dy: Array,
        u: Array,
        weight: Array,
        bias: Array,
        product: Product = lax.mul,
        of_derivative: Product = lax.mul,
    ) -> Array:
        """Returns g, with the derivative of the activation computed from u, and each product in
        the two by these functions."""
        if self.activation is None:
            return dy
        derivative, v = self.activation.derivative, product(u, weight) + bias
        return elementwise_results(derivative, v, dy, product=of_derivative)[0]

    def along_x(self, h: Array, u: Array, rstd: Array, mean: Mean) -> Array:
        """Returns dx for h; as the map is symmetric, also the tangent of u for that of x."""
        h = h - mean(h) if self.centred else h
        return rstd * (h - u * mean(h * u))


class Options(NamedTuple):
    """Holds the static arguments of the primitives of `norm_primitives`, besides the layout.

    **Fields:**

    - `dtype`: that of y.
    - `given`: whether the moments are operands that a strategy has chosen, and not those of x.
    - `kernel`: whether a Pallas kernel computes y and gradients.
    - `contiguous`: whether the values of an example are contiguous in memory.
    """

    norm: RowNorm
    dtype: Any
    given: bool
    kernel: bool
    contiguous: bool = True


class Operands(NamedTuple):
    """Holds the operands of a norm, with as many axes as x, `(*mapped, *example)`, and size 1
    where they are broadcast.

    **Fields:** `mask`: one mask or none. `moments`: variance, and the mean as a pair if there
    is one; empty if the moments of x are still to be computed.
    """

    x: Array
    weight: Array
    bias: Array
    mask: Sequence[Array] = ()
    moments: Sequence[Array] = ()

    @staticmethod
    def of(x: Array, weight: Array, bias: Array, others: Sequence[Array]) -> "Operands":
        """Returns the operands; `others` are moments, if any, and the mask, if any."""
        mask = [v for v in others if v.dtype == bool]
        return Operands(x, weight, bias, mask, others[: len(others) - len(mask)])


class Sums(NamedTuple):
    """Says which gradients a backward pass sums besides that of x.

    **Fields:** `shape`: of the gradients of weight and bias, `None` if neither is wanted.
    `moments_shape`: of the gradients of given moments, `None` if they are not wanted.
    `x_dtype`: of the gradient of x.
    """

    shape: Shape | None = None
    of_weight: bool = False
    of_bias: bool = False
    moments_shape: Shape | None = None
    x_dtype: Any = None

    def chosen(self, weight: Gradient, bias: Gradient) -> list[Gradient]:
        """Returns those of the two gradients, or of their types, that are wanted."""
        wanted = list[Gradient]()
        if self.of_weight:
            wanted.append(weight)
        if self.of_bias:
            wanted.append(bias)
        return wanted

    def with_shapes(self, change: Callable[[Shape], Shape]) -> "Sums":
        """Returns the sums with changed shapes, as `vmap` and a split over devices need."""
        shape = None if self.shape is None else change(self.shape)
        moments_shape = None if self.moments_shape is None else change(self.moments_shape)
        return self._replace(shape=shape, moments_shape=moments_shape)
