"""Does to whole models what a new layer has not had done to it.

Everything here takes a model and its `eqx.nn.State`, and gives new ones; nothing is changed in
place.
"""

from ._fold import FoldedBatchNorm as FoldedBatchNorm
from ._fold import FoldReport as FoldReport
from ._fold import fold as fold
from ._freeze import FrozenBatchNorm as FrozenBatchNorm
from ._freeze import freeze as freeze
from ._freeze import trainable as trainable
from ._freeze import unfreeze as unfreeze
from ._recalibrate import recalibrate as recalibrate
