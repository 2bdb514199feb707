"""Defines `moments` and `normalise`, the two halves of a norm, and `denormalise`, for plain
arrays."""

import math
from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Inexact, Shaped
from numpy.lib.array_utils import normalize_axis_tuple

from eqx_norm import _arguments, _normalise
from eqx_norm._contract import described
from eqx_norm._normalise import Activation, Affine, Example
from eqx_norm.strategies import Moments, Pair
from eqx_norm.strategies._numbers import Floats, cast

Axis = int | Sequence[int] | None


def moments(
    x: Inexact[Array | np.ndarray, "..."],
    axis: Axis = None,
    *,
    mask: Bool[ArrayLike, "..."] | None = None,
    axis_name: Hashable | Sequence[Hashable] = (),
) -> Moments:
    r"""Returns count, mean and variance of x along some axes, as exact as those of the layers.

    $$\mu = \frac{1}{n} \sum_i x_i, \qquad \sigma^2 = \frac{1}{n} \sum_i |x_i - \mu|^2$$

    ```python
    of_batch = moments(x, (0, 2, 3))                     # x is [N, C, H, W]
    y = normalise(x, of_batch, axis=(0, 2, 3))
    both = of_batch.merge(moments(other, (0, 2, 3)))     # of the values of both
    ```

    The moments are float32 or better, and differentiable functions of x, of which x is the only
    residual of its size.

    **Arguments:**

    - `x`: an array, float or complex.
    - `axis`: as for `jnp.var`: the axes to reduce, an int or several; by default all.
    - `mask`: bools that broadcast to x; where it is false, x does not count.
    - `axis_name`: names of axes of `jax.vmap` or of a mesh, over which moments are merged.

    **Returns:** `Moments`. `mean` and `m2` have the shape of `jnp.var(x, axis)`, or `(1,)` for
    a single number. `count` has this shape, too; if it has one axis and there is no mask,
    `count` is a scalar.

    **Raises:** `ValueError` or `TypeError` for an invalid argument; `NameError` for an
    `axis_name` that is not bound.
    """
    example = _checked(x, axis, mask)
    (names,) = _arguments.checked_names(axis_name=axis_name)
    _normalise.size(names, is_example_norm=True)
    kept = example.layout.kept
    if example.x.size == 0:
        return Moments.zero(kept, example.x_upcast.dtype)
    found = _normalise.moments(example, names)
    hi = found.mean.reshape(kept)
    lo = found.mean_pair.rest.reshape(kept)
    m2 = found.m2.reshape(kept)
    return Moments(_expanded_count(found.known_count, example), Pair.of(hi, lo), m2)


def _expanded_count(count: Floats, example: Example) -> Floats:
    """Returns the count in the shape of the moments; a scalar if that has one axis and there is
    no mask."""
    shape = example.layout.kept
    if example.mask is not None:
        # A count without axes is that of positions that are not masked.
        if count.ndim == 0:
            count = jnp.where(example.mask, count, 0)
        if count.size != math.prod(shape):
            count = jnp.broadcast_to(count, example.layout.moments_shape)
        return count.reshape(shape)
    if len(shape) == 1:
        return count
    if isinstance(count, jax.Array):
        return jnp.broadcast_to(count, shape)
    return np.broadcast_to(count, shape)


def normalise(
    x: Inexact[Array | np.ndarray, "*shape"],
    moments: Moments,
    weight: Inexact[ArrayLike, "..."] | None = None,
    bias: Inexact[ArrayLike, "..."] | None = None,
    *,
    axis: Axis = None,
    mask: Bool[ArrayLike, "..."] | None = None,
    eps: float = 1e-5,
    activation: Activation | None = None,
) -> Inexact[Array, "*shape"]:
    r"""Returns x, normalised by moments that need not be those of x.

    $$y = f\Big(\frac{x - \mu}{\sqrt{\sigma^2 + \varepsilon}} \cdot \gamma + \beta\Big)$$

    All values up to that of f are float32 or better. y is differentiable in all arrays, and x
    is the only residual of its size.

    **Arguments:**

    - `x`: an array, float or complex.
    - `moments`: $\mu$ and $\sigma^2$, of the shape of `jnp.var(x, axis)`: from `moments`,
        merged ones, or `Moments.of(mean, variance)`.
    - `weight`, `bias`: $\gamma$ and $\beta$, arrays that broadcast to x.
    - `axis`: the axes along which values share moments, as for `moments`.
    - `mask`: bools that broadcast to x; where it is false, y and its gradient are 0.
    - `eps`: $\varepsilon$, 1e-20 or more; `activation`: f, elementwise.

    **Returns:** y, of the shape and dtype of x.

    **Raises:** `ValueError` or `TypeError` for an invalid argument.
    """
    example = _checked(x, axis, mask)
    _check_moments(moments, example, axis)
    if weight is not None:
        weight = _expand_dims("weight", jnp.asarray(weight), example)
    if bias is not None:
        bias = _expand_dims("bias", jnp.asarray(bias), example)
    activation = _arguments.comparable(_arguments.checked_activation(activation))
    eps = _arguments.checked_number("eps", eps)
    return _normalise.normalise(example, Affine(weight, bias, activation), moments, eps=eps)


def denormalise(
    y: Inexact[Array | np.ndarray, "*shape"],
    moments: Moments,
    weight: Inexact[ArrayLike, "..."] | None = None,
    bias: Inexact[ArrayLike, "..."] | None = None,
    *,
    axis: Axis = None,
    mask: Bool[ArrayLike, "..."] | None = None,
    eps: float = 1e-5,
) -> Inexact[Array, "*shape"]:
    r"""Returns the x of which `normalise` makes y: predictions in the units of the data.

    $$x = \frac{y - \beta}{\gamma} \sqrt{\sigma^2 + \varepsilon} + \mu$$

    ```python
    of_series = moments(x, 1)                            # x is [N, T]
    y = model(normalise(x, of_series, axis=1))           # y is [N, horizon]
    forecast = denormalise(y, of_series, axis=1)
    ```

    All values up to x are float32 or better. x is differentiable in all arrays, and y is the
    only residual of its size.

    **Arguments:** `y`: an array, float or complex; the others as for `normalise`, of y. Where
    $\gamma$ is 0, x is not finite. Where `mask` is false, x and its gradient are 0.

    **Returns:** x, of the shape and dtype of y.

    **Raises:** `ValueError` or `TypeError` for an invalid argument.

    Kim et al., "Reversible Instance Normalization", https://openreview.net/forum?id=cGDAkQo1C0p.
    """
    example = _checked(y, axis, mask, name="y")
    _check_moments(moments, example, axis)
    eps = _arguments.checked_number("eps", eps)
    dtype = example.x_upcast.dtype
    std = jnp.sqrt(moments.variance + eps)
    shape = example.layout.moments_shape
    vectors = std, *moments.mean_pair.words(dtype)
    columns = [vector.astype(dtype).reshape(shape) for vector in vectors]
    gamma = _expand_dims("weight", jnp.asarray(1.0 if weight is None else weight), example)
    gamma = cast("weight", gamma, dtype)
    beta = _expand_dims("bias", jnp.asarray(0.0 if bias is None else bias), example)
    beta = cast("bias", beta, dtype)

    @jax.checkpoint
    def inverse(
        y: Inexact[Array, "*x"],
        columns: list[Inexact[Array, "*#x"]],
        gamma: Inexact[Array, "*#x"],
        beta: Inexact[Array, "*#x"],
    ) -> Inexact[Array, "*x"]:
        std, mean_hi, mean_lo = columns
        if example.mask is not None:
            y = jnp.where(example.mask, y, 0)
        x = ((y.astype(dtype) - beta) * (std / gamma) + mean_lo) + mean_hi
        if example.mask is not None:
            x = jnp.where(example.mask, x, 0)
        return x.astype(y.dtype)

    return inverse(example.x, columns, gamma, beta)


def _check_moments(moments: Moments, example: Example, axis: Axis) -> None:
    """Raises `TypeError` or `ValueError` unless x of these values has moments of this shape."""
    if not isinstance(moments, Moments):
        raise TypeError(
            f"moments is {described(moments)}: give Moments, as moments(x, axis) returns. Of a "
            "mean and a variance, eqx_norm.strategies.Moments.of(mean, variance) makes some."
        )
    kept = example.layout.kept
    if not moments.m2.shape == moments.mean.shape == kept:
        raise ValueError(
            f"moments have a mean of shape {moments.mean.shape}, but for x of shape "
            f"{example.x.shape} and axis={axis!r} a mean and m2 have the shape {kept}. Give "
            "the axis= of moments(x, axis)."
        )


def _checked(x: object, axis: Axis, mask: ArrayLike | None, name: str = "x") -> Example:
    x = _arguments.checked_x(x, name)
    axes = tuple(range(x.ndim)) if axis is None else normalize_axis_tuple(axis, x.ndim, "axis")
    example = Example.along(x, axes)
    if mask is None:
        return example
    mask = _arguments.checked_bools(mask)
    return example._replace(mask=_expand_dims("mask", mask, example))


def _expand_dims(
    name: str, array: Shaped[Array, "..."], example: Example
) -> Shaped[Array, "..."]:
    """Returns the array with as many axes as x; raises unless it broadcasts to x."""
    x = example.x
    shape = (*[1] * (x.ndim - array.ndim), *array.shape)
    if not _arguments.broadcasts(shape, x.shape):
        raise ValueError(
            f"{name} has shape {array.shape}, which does not broadcast to x, of {x.shape}. Add "
            f"the axes that it lacks at the end, for example {name}[:, None]."
        )
    return array.reshape(shape)
