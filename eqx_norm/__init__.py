"""eqx-norm provides normalisation layers for Equinox, whose statistics one argument chooses.

`BatchNorm` and `LayerNorm` replace `eqx.nn.BatchNorm` and `eqx.nn.LayerNorm`. `strategies`
holds the approaches that `BatchNorm(approach=...)` knows by name, and the contract for others.
`models` holds what is done to models that exist: `swap`, `reconfigure`, `freeze`, `fold`,
`recalibrate`, `from_torch` and others. `determinism` finds the first value in which two runs
differ.
"""

from typing import TYPE_CHECKING

from . import strategies as strategies
from ._batch_norm import BatchNorm as BatchNorm
from ._layer_norm import LayerNorm as LayerNorm

if TYPE_CHECKING:
    from . import determinism as determinism
    from . import models as models
    from .models import accumulate as accumulate
    from .models import fold as fold
    from .models import freeze as freeze
    from .models import from_torch as from_torch
    from .models import recalibrate as recalibrate
    from .models import recompute_outputs as recompute_outputs
    from .models import reconfigure as reconfigure
    from .models import swap as swap
    from .models import swapped as swapped
    from .models import to_torch as to_torch
    from .models import trainable as trainable
    from .models import unfreeze as unfreeze
    from .models import unswap as unswap
    from .models import update_once as update_once

__version__ = "0.1.0"
__all__ = [
    "BatchNorm",
    "LayerNorm",
    "accumulate",
    "determinism",
    "fold",
    "freeze",
    "from_torch",
    "models",
    "recalibrate",
    "recompute_outputs",
    "reconfigure",
    "strategies",
    "swap",
    "swapped",
    "to_torch",
    "trainable",
    "unfreeze",
    "unswap",
    "update_once",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


if not TYPE_CHECKING:  # a type checker would take any name for an attribute

    def __getattr__(name: str) -> object:
        """Imports `models` and `determinism` when first asked for: a layer needs neither."""
        import importlib

        if name in ("determinism", "models"):
            return importlib.import_module(f"{__name__}.{name}")
        if name in __all__:  # of models
            return getattr(importlib.import_module(f"{__name__}.models"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
