"""Normalisation in jax.numpy: the specification of every implementation.

Two functions, `moments` and `normalise`, because a strategy stands between them. Both work
in float32 at least, whatever the dtype of their input.
"""

import math
from collections.abc import Hashable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Inexact

from eqx_norm.strategies import Moments

AxisName = Hashable | tuple[Hashable, ...]


def compute_dtype(dtype: DTypeLike) -> jnp.dtype:
    """The precision to calculate in: the input's own, but float32 at least."""
    return jnp.dtype(jnp.float32 if jnp.finfo(dtype).bits < 32 else dtype)


def count(x: Inexact[Array, " channels *spatial"], axis_name: AxisName) -> int:
    """How many values of each channel there are in all, known while tracing.

    **Raises:** `NameError` where no enclosing `vmap` binds `axis_name`.
    """
    try:
        examples = lax.psum(1, axis_name)
    except NameError as error:
        raise NameError(
            f"The axis name {axis_name!r} is not bound ({error}). In training the statistics "
            "are taken over a mapped axis of that name, so map the model over its batch and "
            "name that axis:\n"
            f"    jax.vmap(model, axis_name={axis_name!r}, in_axes=(0, None), "
            "out_axes=(0, None))(x, state)\n"
            "(one vmap for each name, if there are several); or use what is remembered "
            "instead of the batch: eqx.nn.inference_mode(model)."
        ) from None
    return math.prod(x.shape[1:]) * examples


def moments(x: Inexact[Array, " channels *spatial"], axis_name: AxisName) -> Moments:
    r"""Moments of each channel over its spatial axes and the named axes.

    **Arguments:**

    - `x`: one example, `(channels, *spatial)`, float or complex, under a `vmap` (or
        `shard_map`, `pmap`) that binds `axis_name`.
    - `axis_name`: the name, or a tuple of names, to reduce over.

    **Returns:**

    `Moments` of shape `(channels,)`, in float32 or better. With $k$ the first value of the
    channel, in exact arithmetic any $k$ gives the same:

    $$\text{mean} = k + \tfrac{1}{n} \sum_i (x_i - k), \qquad
      d_i = x_i - \text{mean}, \qquad
      \text{m2} = \max\big(\sum_i |d_i|^2 - \tfrac{1}{n} |\sum_i d_i|^2,\; 0\big).$$

    Without the shift by $k$ the mean of a constant is not that constant: XLA multiplies the
    sum by the rounded 1/n. With it, a constant channel has m2 = 0 to the bit (the failure of
    https://github.com/BVLC/caffe/pull/3963). The second term of m2 takes back what rounding
    the mean to its own precision has added.

    **Raises:** `NameError` where no enclosing `vmap` binds `axis_name`.
    """
    dtype = compute_dtype(x.dtype)
    per_channel = x.astype(dtype).reshape(x.shape[0], -1)
    n = count(x, axis_name)

    def total(values: Array) -> Array:
        return lax.psum(values.sum(axis=1), axis_name)

    first = lax.stop_gradient(_first(per_channel[:, 0], axis_name))
    mean = first + total(per_channel - first[:, None]) / n
    deviation = per_channel - mean[:, None]
    rest = total(deviation)
    m2 = total(_squared(deviation)) - _squared(rest) / n
    return Moments(jnp.asarray(n, m2.dtype), mean, jnp.maximum(m2, 0))


def normalise(
    x: Inexact[Array, " channels *spatial"],
    used: Moments,
    weight: Inexact[Array, " channels"] | None,
    bias: Inexact[Array, " channels"] | None,
    *,
    eps: float,
) -> Inexact[Array, " channels *spatial"]:
    r"""$y = (x - \text{mean}) \cdot \text{rstd} \cdot \text{weight} + \text{bias}$, with
    $\text{rstd} = 1 / \sqrt{\text{variance} + \varepsilon}$, in the dtype of `x`.

    The mean is subtracted first, and never folded into the bias: folding would cancel.
    `used`, `weight` and `bias` hold one value per channel; the last two may be `None`.
    """
    dtype = compute_dtype(x.dtype)

    def over_space(vector: Array) -> Array:
        return vector.astype(dtype).reshape(-1, *(1,) * (x.ndim - 1))

    scale = lax.rsqrt(used.variance + eps)
    if weight is not None:
        scale = scale.astype(dtype) * weight.astype(dtype)
    y = (x.astype(dtype) - over_space(used.mean)) * over_space(scale)
    if bias is not None:
        y = y + over_space(bias)
    return y.astype(x.dtype)


def _first(vector: Array, axis_name: AxisName) -> Array:
    """The vector that the first example holds."""
    # One name at a time: all_gather takes no tuple of vmapped names.
    for name in axis_name if isinstance(axis_name, tuple) else (axis_name,):
        try:
            vector = lax.all_gather(vector, name)[0]
        except (AssertionError, ValueError) as error:
            # Seen with jax 0.10.2 and 0.12.0.1, where any collective over a vmapped axis fails.
            if jax.sharding.get_abstract_mesh().manual_axes:
                raise ValueError(
                    f"JAX refuses collectives over the vmapped axis {name!r} inside a "
                    "shard_map that checks varying manual axes. Write "
                    "jax.shard_map(..., check_vma=False) around this layer."
                ) from error
            raise
    return vector


def _squared(values: Array) -> Array:
    return (values * values.conj()).real
