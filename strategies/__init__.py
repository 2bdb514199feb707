"""Provides strategies, which choose the statistics to normalise a batch by and to remember.

`BatchNorm(approach=...)` takes a strategy object, or the name of one: `"batch"` (`Batch`),
`"ema"` (`Ema`), `"adam"` (`Adam`), `"smooth_start"` (`SmoothStart`), `"renorm"` (`Renorm`) or
`"variance_clip"` (`VarianceClip`). `AbstractStrategy` is the base class for your own.
"""

from ._accumulated import Accumulated as Accumulated
from ._accumulated import Accumulation as Accumulation
from ._adam import Adam as Adam
from ._average import Average as Average
from ._base import AbstractStrategy as AbstractStrategy
from ._batch import Batch as Batch
from ._cumulative import Cumulative as Cumulative
from ._cumulative import Seen as Seen
from ._ema import Ema as Ema
from ._frozen import Frozen as Frozen
from ._moments import Moments as Moments
from ._named import NAMED as NAMED
from ._named import named as named
from ._pair import Pair as Pair
from ._renorm import Ramp as Ramp
from ._renorm import Renorm as Renorm
from ._running import AbstractRunningStrategy as AbstractRunningStrategy
from ._running import Running as Running
from ._smooth_start import SmoothStart as SmoothStart
from ._training_batch import TrainingBatch as TrainingBatch
from ._variance_clip import VarianceClip as VarianceClip
from ._wrapper import AbstractWrapper as AbstractWrapper
