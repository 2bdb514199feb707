"""Defines what is measured of layer norms: a kind of row for each part."""

from typing import NamedTuple

EXCHANGED = "exchanged"  # the right answer, with dweight and dbias exchanged


class Pair(NamedTuple):
    """Holds what OneFlow's pair gives."""

    dtype: str
    layer: str
    y: float  # of the second value; the first one's is its opposite
    error: float  # of y, the larger of both
    dx: float  # of the sum of y, the larger of both; 0 is right


class AtMean(NamedTuple):
    """Holds what a pair gives that is as close together, at another mean."""

    layer: str
    mean: float
    error: float
    dx: float


class Gradients(NamedTuple):
    """Holds the errors of the gradients, as in `lab.exact.Errors`."""

    dtype: str
    shape: tuple[int, ...]  # of an example
    layer: str
    dweight: float  # NaN where there is no weight
    dbias: float
    dx: float


class ByBatchNorm(NamedTuple):
    """Says how far a layer norm made of a batch norm, as OneFlow's was, is from the other."""

    dtype: str
    layer: str
    difference: float  # of y, the largest over the shapes
