"""The one operation, and the only door to its implementations (`kernels` chooses).

A layer takes the `moments` of its input, has a strategy decide which moments to use, and
`normalise`s by those. Both functions know arrays and axis names, and nothing of strategies.
"""

import math
import operator
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import Partial
from jaxtyping import Array, Bool, Inexact

from eqx_norm.strategies import Moments

from . import elementwise, invariant, reference, rows, rule
from .elementwise import as_tree as as_tree
from .reference import Activation as Activation
from .reference import compute_dtype
from .rule import AxisName as AxisName

Implementation = Literal["auto", "xla", "pallas_triton", "pallas_mosaic"]
# Of what is calculated over a batch.
BatchImplementation = Literal[Implementation, "device_invariant"]


def check(implementation: str, available: Any) -> None:
    """`ValueError` unless it is one of those that are `available`, a `Literal`."""
    available = get_args(available)
    if implementation not in available:
        raise ValueError(
            f"implementation={implementation!r} is not available. Available are "
            f"{', '.join(map(repr, available))}; 'auto' takes the fastest that serves."
        )


def of_vectors(
    f: Callable[..., Any], implementation: BatchImplementation
) -> Callable[..., Any]:
    """`f`, which calculates small vectors of others, as `implementation` wants it done."""
    return invariant.rounded(f) if implementation == "device_invariant" else f


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


def widened(x: Array) -> Array:
    """`x` in the precision to calculate in: what both halves are differentiated through, so
    that the gradients which x gets from each are rounded to its own precision once."""
    return x.astype(compute_dtype(x.dtype))


def moments(
    x: Inexact[Array, " channels *spatial"],
    axis_name: AxisName,
    mask: Bool[Array, "..."] | None = None,
    *,
    wide: Array | None = None,
    implementation: BatchImplementation = "auto",
) -> Moments:
    """Moments of each channel over its spatial axes and the named axes.

    **Arguments:**

    - `x`: one example, float or complex, under a `vmap` (or `shard_map`, `pmap`) that binds
        `axis_name`.
    - `axis_name`: the name, or a tuple of names, to reduce over.
    - `mask`: which of the values count, of a shape that broadcasts to `spatial`. Without one
        the moments' count is known while tracing.
    - `wide`: `widened(x)`, where `normalise` is given it as well.
    - `implementation`: as for the layers; see `check`.

    **Returns:** `Moments` of shape `(channels,)`, in float32 or better. How they are computed,
    and how exactly: `reference.statistics`.
    """
    how = _how(implementation, axis_name, x)
    if jnp.iscomplexobj(x):
        # A complex channel is two real ones, whose squared deviations add up.
        parts = moments(_parts(x), axis_name, mask, implementation=implementation)
        (real, imag), channels = jnp.split(parts.m2, 2), x.shape[0]
        return Moments(
            parts.count,
            _whole(parts.mean, channels),
            real + imag,
            _whole(parts.mean_rest, channels),
        )
    wide = _flat(widened(x) if wide is None else wide)
    count, mean, rest, m2 = rule.moments(_flat(x), wide, _flat_mask(x, mask), axis_name, how)
    # The mask is the same for all channels, and so is the count.
    return Moments(count[0], mean, m2, rest)


def normalise(
    x: Inexact[Array, " channels *spatial"],
    used: Moments,
    weight: Inexact[Array, " channels *spatial"] | Inexact[Array, " channels"] | None,
    bias: Inexact[Array, " channels *spatial"] | Inexact[Array, " channels"] | None,
    *,
    eps: float,
    activation: Activation | None = None,
    mask: Bool[Array, "..."] | None = None,
    wide: Array | None = None,
    implementation: BatchImplementation = "auto",
    axis_name: AxisName = (),
) -> Inexact[Array, " channels *spatial"]:
    r"""$y = \text{activation}((x - \text{mean}) \cdot \text{rstd} \cdot \text{weight} +
    \text{bias})$, with $\text{rstd} = 1 / \sqrt{\text{variance} + \varepsilon}$, in the dtype
    of `x`; 0 where `mask` is false.

    Everything up to the activation's result is calculated in float32 at least. `used` holds one
    value per channel. So do `weight` and `bias`, or one for each value of an example; and they
    may be `None`.
    """
    dtype = compute_dtype(x.dtype)
    rstd = _rstd(used, eps, implementation).astype(jnp.finfo(dtype).dtype)
    mean = used.mean.astype(dtype)
    # What a mean in float64 has more than float32 can hold is not lost.
    rest = ((used.mean - mean.astype(used.mean.dtype)) + used.mean_rest).astype(dtype)
    weight, bias = (None if v is None else v.astype(dtype) for v in (weight, bias))
    how = _how(implementation, axis_name, x)
    activation = elementwise.function(activation)
    pure = activation is None or elementwise.is_pure(activation, x.shape, dtype)
    if any(v is not None and v.ndim > 1 for v in (weight, bias)):
        activation, pure = elementwise.Affine(weight, bias, activation), False
        weight = bias = None
    if jnp.iscomplexobj(x):
        y = _complex_affine(x, mean, rest, rstd, weight, bias, mask, implementation)
        y = y if activation is None else activation(y)
        return y if mask is None else jnp.where(mask, y, 0)
    operands = (
        _flat(x),
        _flat(widened(x) if wide is None else wide),
        mean,
        rest,
        rstd if weight is None else of_vectors(operator.mul, implementation)(rstd, weight),
        jnp.zeros_like(rstd) if bias is None else bias,
        _flat_mask(x, mask),
    )
    if activation is None or pure:
        y = rule.normalise(*operands, activation, how)
    elif isinstance(how, invariant.Across):
        raise ValueError(
            f"activation={activation} has arrays of its own, or is not seen to be elementwise: "
            "its gradients are sums that JAX orders, and not "
            f"implementation={implementation!r}. Apply it after the layer."
        )
    else:
        y = rule.normalise_and(activation, x.shape, *operands)
    return y.astype(x.dtype).reshape(x.shape)


def _rstd(used: Moments, eps: float, implementation: BatchImplementation) -> Array:
    variance = of_vectors(lambda used: used.variance + eps, implementation)(used)
    rsqrt = invariant.rsqrt if implementation == "device_invariant" else reference.rsqrt
    return rsqrt(variance)


def _how(
    implementation: BatchImplementation, axis_name: AxisName, x: Array
) -> str | invariant.Across:
    """What the passes are told."""
    if implementation != "device_invariant":
        return implementation
    if jnp.iscomplexobj(x):
        raise ValueError(
            f"implementation={implementation!r} is for real input, and x has dtype {x.dtype}. "
            "implementation='auto' takes it."
        )
    mesh = jax.sharding.get_abstract_mesh().manual_axes
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    return invariant.Across(tuple(name for name in names if name in mesh))


def normalise_row(
    x: Inexact[Array, "*shape"],
    weight: Inexact[Array, "*shape"] | None,
    bias: Inexact[Array, "*shape"] | None,
    *,
    eps: float,
    activation: Activation | None = None,
    implementation: Implementation = "auto",
) -> Inexact[Array, "*shape"]:
    """`normalise` by the `moments` of the same x, all of it one channel."""
    dtype = compute_dtype(x.dtype)
    plain = elementwise.function(activation)
    pure = plain is None or elementwise.is_pure(plain, x.shape, dtype)
    if pure and not jnp.iscomplexobj(x):
        weight, bias = (
            None if v is None else v.reshape(1, -1).astype(dtype) for v in (weight, bias)
        )
        how = rows.How(eps, plain, implementation)
        return rows.normalise_row(x.reshape(1, -1), weight, bias, how).reshape(x.shape)
    weight, bias = (None if v is None else v[None] for v in (weight, bias))
    x = x[None]
    wide = widened(x)
    used = moments(x, (), wide=wide, implementation=implementation)
    # Of one channel, in front of the example's shape, which is what an activation is to see.
    plain = plain and Partial(lambda plain, u: plain(u[0])[None], plain)
    how: Any = {"eps": eps, "activation": plain, "implementation": implementation}
    return normalise(x, used, weight, bias, wide=wide, **how)[0]


def _complex_affine(
    x: Array,
    mean: Array,
    rest: Array,
    rstd: Array,
    weight: Array | None,
    bias: Array | None,
    mask: Array | None,
    implementation: BatchImplementation,
) -> Array:
    mean, rest = _parts(mean), _parts(rest)
    rstd = jnp.concatenate([rstd, rstd])
    zero = jnp.zeros_like(rstd)
    flat, mask = _flat(_parts(x)), _flat_mask(x, mask)
    y = rule.normalise(flat, flat, mean, rest, rstd, zero, mask, None, implementation)
    y = _whole(y, x.shape[0])
    y = y if weight is None else y * weight[:, None]
    y = y if bias is None else y + bias[:, None]
    return y.reshape(x.shape)


def _parts(x: Array) -> Array:
    return jnp.concatenate([x.real, x.imag])


def _whole(parts: Array, channels: int) -> Array:
    return lax.complex(parts[:channels], parts[channels:])


def _flat(x: Array) -> Array:
    # Loops follow an array's axes, and rows of 7 or 8 are too short for a vector unit.
    return x.reshape(x.shape[0], -1)


def _flat_mask(x: Array, mask: Array | None) -> Array | None:
    return None if mask is None else jnp.broadcast_to(mask, x.shape[1:]).reshape(1, -1)
