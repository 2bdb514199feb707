"""Makes a strategy object from a layer's `approach=`, `mode=` and `momentum=`."""

import functools
import warnings
from typing import Any

from eqx_norm._warnings import stacklevel
from eqx_norm.strategies import AbstractStrategy, named


def resolve(
    approach: str | AbstractStrategy[Any] | None, mode: str | None, momentum: float | None
) -> AbstractStrategy[Any]:
    """Returns the strategy object `approach`, or makes the one that `approach` or `mode` names.

    **Raises:** `ValueError` for an unknown name, an `approach` that is neither a name nor a
    strategy object, a `mode` that contradicts it, and a `momentum` beside a strategy object.
    """
    if mode is not None:
        if approach is not None and approach != mode:
            raise ValueError(
                f"mode={mode!r} and approach={approach!r} were both given, and differ: they "
                "are two names for one argument. Leave one of them out."
            )
        approach = mode
    if approach is None:
        _warn_of_the_default()
        approach = "batch"
    if isinstance(approach, str):
        return named(approach, 0.99 if momentum is None else momentum)
    if not isinstance(approach, AbstractStrategy):
        raise ValueError(
            f"approach={approach!r} is neither a name nor a strategy object. Write "
            "approach='batch', or approach=eqx_norm.strategies.Batch(), with the parentheses."
        )
    if momentum is not None:
        raise ValueError(
            f"momentum={momentum!r} was given beside approach={approach}: the momentum belongs "
            "to the strategy. Set it there, for example "
            f"approach=eqx_norm.strategies.Batch(momentum={momentum!r}), or leave it out."
        )
    return approach


# The cache limits this to one warning, because most models have several layers.
@functools.cache
def _warn_of_the_default() -> None:
    warnings.warn(
        "BatchNorm was made without approach= (or mode=), so it uses approach='batch': it "
        "normalises a training batch by the batch's own statistics. The default of "
        "eqx.nn.BatchNorm is mode='ema'. Write approach='batch' to avoid this warning, or "
        "approach='ema' to train as Equinox does by default; see "
        "https://github.com/patrick-kidger/equinox/issues/659.",
        stacklevel=stacklevel(),
    )
