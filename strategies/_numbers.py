"""Checks arguments that are numbers; the caller raises an error that explains the number."""

from typing import Any

import numpy as np


def number(value: Any) -> Any:
    """Returns a real number as a `float`; anything else unchanged, also bools and text."""
    if isinstance(value, bool | np.bool_ | str | bytes) or np.iscomplexobj(value):
        return value
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return value


def is_count(value: Any) -> bool:
    """Returns whether `value` is an integer of 1 or more, and no bool."""
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return is_integer and int(value) >= 1
