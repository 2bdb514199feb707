"""Does to whole models what a new layer has not had done to it.

Everything here takes a model and its `eqx.nn.State`, and gives new ones; nothing is changed in
place.
"""

from ._recompute import recompute_outputs as recompute_outputs
