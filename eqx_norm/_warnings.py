"""Warns of layers whose output does not depend on x, and finds the user's line for warnings."""

import inspect
import warnings

from jaxtyping import Array

from eqx_norm._normalise import AxisName


def stacklevel() -> int:
    """Returns the `stacklevel` with which a warning points to the user's innermost line."""
    # From Python 3.12 on, `warnings.warn(skip_file_prefixes=...)` can do this.
    level, frame = 0, inspect.currentframe()
    passed = ("eqx_norm", "equinox", "jax")
    while frame and frame.f_globals.get("__name__", "").split(".")[0] in passed:
        level, frame = level + 1, frame.f_back
    return level


def warn_of_one_value(
    x: Array, axis_name: AxisName, kind: str, to_do: str, when: str = ""
) -> None:
    """Warns that each channel, or other `kind` of group, has moments of only one value."""
    warnings.warn(
        f"{when}x of shape {x.shape} and axis_name={axis_name!r} hold one value per {kind}. It "
        f"is its own mean, so y is the layer's bias, whatever x is. {to_do}",
        stacklevel=stacklevel(),
    )
