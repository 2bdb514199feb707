"""eqx-norm provides normalisation layers for Equinox, whose statistics one argument chooses.

`BatchNorm` and `LayerNorm` replace `eqx.nn.BatchNorm` and `eqx.nn.LayerNorm`. `strategies`
holds the approaches that `BatchNorm(approach=...)` knows by name, and the contract for others.
`determinism` finds the first value in which two runs differ.
"""

from typing import TYPE_CHECKING

from . import strategies as strategies
from ._batch_norm import BatchNorm as BatchNorm
from ._layer_norm import LayerNorm as LayerNorm
from .models import recompute_outputs as recompute_outputs

if TYPE_CHECKING:
    from . import determinism as determinism

__version__ = "0.1.0"
__all__ = ["BatchNorm", "LayerNorm", "determinism", "recompute_outputs", "strategies"]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


if not TYPE_CHECKING:  # a type checker would take any name for an attribute

    def __getattr__(name: str) -> object:
        """Imports `determinism` when it is first asked for: a model does not need it."""
        if name != "determinism":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import importlib

        return importlib.import_module(f"{__name__}.determinism")
