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


_FIXES = {
    "channel": "Give a larger batch, or train with LayerNorm or GroupNorm. To infer, use "
    "eqx.nn.inference_mode(model).",
    "group": "Normalise more values together: by fewer groups, at more positions, or in a "
    "layer of another shape; or use RMSNorm, which keeps the sign.",
}


def warn_of_one_value(x: Array, axis_name: AxisName, kind: str) -> None:
    """Warns that each channel of a batch, or each group of an example, has only one value."""
    warnings.warn(
        f"x of shape {x.shape} and axis_name={axis_name!r} hold one value per {kind}. It is "
        f"its own mean, so y is the layer's bias, whatever x is. {_FIXES[kind]}",
        stacklevel=stacklevel(),
    )
