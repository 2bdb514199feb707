"""Normalisation layers for Equinox, with statistics that are one argument apart."""

from eqx_norm import strategies as strategies

from ._batch_norm import BatchNorm as BatchNorm
from ._layer_norm import LayerNorm as LayerNorm
