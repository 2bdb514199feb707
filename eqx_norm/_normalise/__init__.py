"""The one operation, and the only place where an implementation of it is chosen.

A layer takes the `moments` of its input, has a strategy decide which moments to use, and
`normalise`s by those. Both functions know arrays and axis names, and nothing of strategies.
"""

from typing import Literal, get_args

from jaxtyping import Array

from eqx_norm.strategies import Moments

from . import reference

Implementation = Literal["auto", "xla"]
AxisName = reference.AxisName
count = reference.count


def check(implementation: str) -> None:
    """`ValueError` unless `implementation` is one that this version has."""
    known = get_args(Implementation)
    if implementation not in known:
        raise ValueError(
            f"implementation={implementation!r} is not available. Available are "
            f"{', '.join(map(repr, known))}; 'auto' takes the fastest that serves."
        )


def moments(
    x: Array, axis_name: AxisName, *, implementation: Implementation = "auto"
) -> Moments:
    """Per-channel moments of `x`; see `reference.moments`."""
    check(implementation)
    return reference.moments(x, axis_name)


def normalise(
    x: Array,
    used: Moments,
    weight: Array | None,
    bias: Array | None,
    *,
    eps: float,
    implementation: Implementation = "auto",
) -> Array:
    """`(x - mean) * rsqrt(variance + eps) * weight + bias`; see `reference.normalise`."""
    check(implementation)
    return reference.normalise(x, used, weight, bias, eps=eps)
