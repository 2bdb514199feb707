"""Provides normalisation layers for Equinox; `approach=` chooses how batch norm trains.

`BatchNorm`, `LayerNorm`, `GroupNorm` and `RMSNorm` replace Equinox's layers of these names.
`moments` and `normalise` are the two halves of a norm, for plain arrays, and `denormalise` is
the inverse of the second.
`strategies` has the values of `BatchNorm(approach=...)` and the base class for your own.
`models` converts, freezes, folds and recalibrates existing models. `determinism` finds the
first value in which two runs differ.
"""

from typing import TYPE_CHECKING

from . import strategies as strategies
from ._arrays import denormalise as denormalise
from ._arrays import moments as moments
from ._arrays import normalise as normalise
from ._batch_norm import BatchNorm as BatchNorm
from ._group_norm import GroupNorm as GroupNorm
from ._instance_norm import InstanceNorm as InstanceNorm
from ._layer_norm import LayerNorm as LayerNorm
from ._rms_norm import RMSNorm as RMSNorm

if TYPE_CHECKING:
    from . import determinism as determinism
    from . import models as models
else:  # with `__getattr__`, a type checker would accept any name

    def __getattr__(name: str) -> object:
        """Imports `models` and `determinism` at their first use, since layers need neither."""
        from importlib import import_module

        if name in ("determinism", "models"):
            return import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__version__ = "0.1.0"
__all__ = [
    "BatchNorm",
    "GroupNorm",
    "InstanceNorm",
    "LayerNorm",
    "RMSNorm",
    "denormalise",
    "determinism",
    "models",
    "moments",
    "normalise",
    "strategies",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
