"""Converts, freezes, folds and recalibrates existing models.

Each function takes a model, and its `eqx.nn.State` where needed, and returns new ones; nothing
is changed in place. docs/api/models.md has an example of each function.
"""

from ._decay import decay_mask as decay_mask
from ._fold import FoldedBatchNorm as FoldedBatchNorm
from ._fold import fold_pairs as fold_pairs
from ._fold import propose_pairs as propose_pairs
from ._freeze import freeze as freeze
from ._freeze import trainable as trainable
from ._freeze import unfreeze as unfreeze
from ._pool import pool_statistics as pool_statistics
from ._recalibrate import recalibrate as recalibrate
from ._recompute import recompute_outputs as recompute_outputs
from ._reconfigure import reconfigure as reconfigure
from ._swap import swap as swap
from ._torch import from_torch as from_torch
from ._torch import to_torch as to_torch
from ._torch_layers import TorchReport as TorchReport
from ._unswap import unswap as unswap
