"""The one operation, and the only place where an implementation of it is chosen.

A layer takes the `moments` of its input, has a strategy decide which moments to use, and
`normalise`s by those. Both functions know arrays and axis names, and nothing of strategies.
"""

from typing import Literal

from jaxtyping import Array

from eqx_norm.strategies import Moments

from . import reference

Implementation = Literal["auto", "xla"]
_IMPLEMENTATIONS = {"auto": reference, "xla": reference}
AxisName = reference.AxisName
count = reference.count


def check(implementation: str) -> None:
    """`ValueError` unless `implementation` is one that this version has."""
    if implementation not in _IMPLEMENTATIONS:
        raise ValueError(
            f"implementation={implementation!r} is not available. Available are "
            f"{', '.join(map(repr, _IMPLEMENTATIONS))}; 'auto' takes the fastest that serves."
        )


def moments(
    x: Array, axis_name: AxisName, *, implementation: Implementation = "auto"
) -> Moments:
    """Per-channel moments of `x`; see `reference.moments`."""
    return _IMPLEMENTATIONS[implementation].moments(x, axis_name)


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
    return _IMPLEMENTATIONS[implementation].normalise(x, used, weight, bias, eps=eps)
