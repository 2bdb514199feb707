"""Maps the names for `approach=` to strategies."""

from collections.abc import Callable
from typing import Any

from ._adam import Adam
from ._base import AbstractStrategy
from ._batch import Batch
from ._ema import Ema
from ._renorm import Renorm
from ._smooth_start import SmoothStart
from ._variance_clip import VarianceClip

NAMED: dict[str, Callable[[float], AbstractStrategy[Any]]] = {
    "ema": Ema,
    "batch": Batch,
    "adam": Adam,
    "smooth_start": SmoothStart,
    "renorm": Renorm,
    "variance_clip": lambda momentum: VarianceClip(Batch(momentum)),
}
"""Maps the names for `approach=` to functions that make a strategy from a momentum."""


def named(name: str, momentum: float) -> AbstractStrategy[Any]:
    """Returns the strategy with this name in `NAMED`, made with `momentum`.

    **Raises:** `ValueError` for an unknown name.
    """
    if not isinstance(name, str) or name not in NAMED:
        raise ValueError(
            f"approach={name!r} is not known. The known names are "
            f"{', '.join(map(repr, NAMED))}; or give a strategy object, for example "
            "approach=eqx_norm.strategies.Batch(momentum=0.9)."
        )
    return NAMED[name](momentum)
