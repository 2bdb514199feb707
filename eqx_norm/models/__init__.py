"""Does to whole models what a new layer has not had done to it.

Everything here takes a model and its `eqx.nn.State`, and gives new ones; nothing is changed in
place.
"""

from ._accumulate import accumulate as accumulate
from ._accumulate import update_once as update_once
from ._recompute import recompute_outputs as recompute_outputs
from ._reconfigure import reconfigure as reconfigure
from ._swap import swap as swap
from ._swap import swapped as swapped
from ._unswap import unswap as unswap
