"""Does to whole models what a new layer has not had done to it.

Everything here takes a model and its `eqx.nn.State`, and gives new ones; nothing is changed in
place.
"""

from ._accumulate import accumulate as accumulate
from ._accumulate import update_once as update_once
from ._reconfigure import reconfigure as reconfigure
from ._swap import swap as swap
from ._swap import swapped as swapped
from ._torch import from_torch as from_torch
from ._torch import to_torch as to_torch
from ._torch_names import TorchReport as TorchReport
from ._unswap import unswap as unswap
