"""What a layer's `approach=` and `momentum=` mean together: one strategy object."""

import functools
import warnings
from typing import Any

from eqx_norm.strategies import AbstractStrategy, named


class Unsaid(float):
    """A default that can be told from the same number said by the user."""


def resolve(
    approach: str | AbstractStrategy[Any] | None, momentum: float
) -> AbstractStrategy[Any]:
    """The strategy that `approach` names or is; `momentum` goes to one that is named.

    **Raises:** `ValueError` for an unknown name, for what is no strategy object, and for a
    momentum said beside a strategy object, which holds its own.
    """
    if approach is None:
        _warn_of_the_default()
        approach = "batch"
    if isinstance(approach, str):
        return named(approach, float(momentum))
    if not isinstance(approach, AbstractStrategy):
        raise ValueError(
            f"approach={approach!r} is neither a name nor a strategy object. Write "
            "approach='batch', or approach=eqx_norm.strategies.Batch(), with the parentheses."
        )
    if not isinstance(momentum, Unsaid):
        raise ValueError(
            f"momentum={momentum!r} was given beside approach={approach}: the momentum belongs "
            "to the strategy. Say it there, for example "
            f"approach=eqx_norm.strategies.Batch(momentum={momentum!r}), or leave it out."
        )
    return approach


# Most models have several layers: one warning is enough for all of them.
@functools.cache
def _warn_of_the_default() -> None:
    warnings.warn(
        "BatchNorm was made without approach=; it takes approach='batch', which normalises "
        "training batches by their own statistics. Write approach='batch' to say so, or "
        "choose another; see https://github.com/patrick-kidger/equinox/issues/659.",
        stacklevel=2,
    )
