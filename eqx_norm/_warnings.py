"""Warns of layers whose output does not depend on x, and finds the user's line for warnings."""

import inspect
import warnings
from typing import Literal

from jaxtyping import Array, Inexact

from eqx_norm._normalise import AxisName

_LIBRARIES = ("eqx_norm", "equinox", "jax")


def stacklevel() -> int:
    """Returns the `stacklevel` with which a warning points to the user's innermost line."""
    # From Python 3.12 on, `warnings.warn(skip_file_prefixes=...)` can do this.
    level = 0
    frame = inspect.currentframe()
    while frame and frame.f_globals.get("__name__", "").split(".")[0] in _LIBRARIES:
        level += 1
        frame = frame.f_back
    return level


_FIXES = {
    "channel": "Give a larger batch, or train with LayerNorm or GroupNorm. To infer, use "
    "eqx.nn.inference_mode(model).",
    "group": "Normalise more values together: by fewer groups, at more positions, or in a "
    "layer of another shape; or use RMSNorm, which keeps the sign.",
}


def warn_of_one_value(
    x: Inexact[Array, "..."], axis_name: AxisName, kind: Literal["channel", "group"]
) -> None:
    """Warns that each channel of a batch, or each group of an example, has only one value."""
    warnings.warn(
        f"x of shape {x.shape} and axis_name={axis_name!r} hold one value per {kind}. It is "
        f"its own mean, so y is the layer's bias, whatever x is. {_FIXES[kind]}",
        stacklevel=stacklevel(),
    )
