"""Does to whole models what a new layer has not had done to it.

Everything here takes a model and its `eqx.nn.State`, and gives new ones; nothing is changed in
place.
"""

from ._torch import from_torch as from_torch
from ._torch import to_torch as to_torch
from ._torch_names import TorchReport as TorchReport
