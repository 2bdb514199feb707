"""What a layer's `approach=`, `mode=` and `momentum=` mean together: one strategy object."""

import functools
import inspect
import warnings
from typing import Any

from eqx_norm.strategies import AbstractStrategy, named


class Unsaid(float):
    """A default that can be told from the same number said by the user."""


def resolve(
    approach: str | AbstractStrategy[Any] | None, mode: str | None, momentum: float
) -> AbstractStrategy[Any]:
    """Returns the strategy that `approach` is, or that it or `mode` names.

    `momentum` goes to one that is named.

    **Raises:** `ValueError` for an unknown name, for what is no strategy object, for a mode
    beside another approach, and for a momentum said beside a strategy object, which holds its
    own.
    """
    if mode is not None:
        approach = _of_mode(mode, approach)
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


def _of_mode(mode: str, approach: str | AbstractStrategy[Any] | None) -> str:
    """Returns the name that `mode` gives, which `approach` must not contradict."""
    if mode not in ("ema", "batch"):
        raise ValueError(
            f"mode={mode!r} is neither 'ema' nor 'batch': it is what eqx.nn.BatchNorm calls "
            "the approach, and takes those two. Give any other as approach=."
        )
    if approach is not None and not (isinstance(approach, str) and approach == mode):
        raise ValueError(
            f"mode={mode!r} and approach={approach!r} were both given, and differ: they are "
            "two names of one argument. Leave one of them out."
        )
    return mode


# Most models have several layers: one warning is enough for all of them.
@functools.cache
def _warn_of_the_default() -> None:
    warnings.warn(
        "BatchNorm was made without approach= (or mode=); it takes approach='batch', which "
        "normalises training batches by their own statistics, where eqx.nn.BatchNorm takes "
        "mode='ema'. Write approach='batch' to say so, approach='ema' to train as before, or "
        "choose another; see https://github.com/patrick-kidger/equinox/issues/659.",
        stacklevel=_stacklevel(),
    )


def _stacklevel() -> int:
    """Returns how many calls above its own caller the innermost line of the user's is.

    `warnings.warn(skip_file_prefixes=...)` finds it by itself, from Python 3.12 on.
    """
    level, frame = 0, inspect.currentframe()
    while frame and _package(frame.f_globals) in ("eqx_norm", "equinox", "jax"):
        level, frame = level + 1, frame.f_back
    return level


def _package(names: dict[str, Any]) -> str:
    return names.get("__name__", "").split(".")[0]
