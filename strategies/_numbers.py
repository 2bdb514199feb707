"""Says which arguments are numbers, so that each error can say what its number is for."""

from typing import Any, TypeVar, cast

import jax.numpy as jnp

Value = TypeVar("Value")


def number(value: Value) -> Value:
    """Returns a real number as a `float`; anything else unchanged, also bools and text."""
    if isinstance(value, bool | str):
        return value
    try:
        return cast(Any, float(cast(Any, value)))
    except TypeError:
        return value


def is_count(value: Any) -> bool:
    """Returns whether `value` is an integer of 1 or more, and no bool."""
    is_integer = isinstance(value, int | jnp.integer) and not isinstance(value, bool)
    return is_integer and int(value) >= 1
