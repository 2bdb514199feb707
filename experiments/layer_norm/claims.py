"""Defines what is measured of layer norms, and judges what this package claims of it."""

from typing import NamedTuple

import numpy as np

from experiments.lab import rows
from experiments.lab.claims import Claim, worst
from experiments.lab.experiment import Files
from experiments.lab.peers import names

# A few roundings: those of experiments.accuracy, of float32; float64 has 29 bits more.
Y, DX, DWEIGHT, DBIAS = 1e-6, 1e-6, 1e-7, 2e-7
SCALE = {"float32": 1.0, "bfloat16": 1.0, "float64": 2.0**-29}
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


class Measured:
    def __init__(self, files: Files):
        self.pair = rows.load(files.csv("_pair"), Pair)
        self.gradients = rows.load(files.csv("_gradients"), Gradients)
        self.by_batch_norm = rows.load(files.csv("_by_batch_norm"), ByBatchNorm)


def _within(text: str, bound: float, part: str, quantity: str, form: str) -> Claim:
    """Returns the claim that the quantity is within the bound; `form` says the worst row."""

    def judge(measured: Measured) -> tuple[str, bool]:
        ours = [row for row in getattr(measured, part) if row.layer == names.OURS]
        if part == "gradients":  # where there is no weight, or no bias
            ours = [row for row in ours if not np.isnan(getattr(row, quantity))]
        largest = [
            worst(of, lambda row: getattr(row, quantity))
            for of in rows.by(ours, lambda row: row.dtype).values()
        ]
        said = ", ".join(f"{form} ({{dtype}})".format_map(row._asdict()) for _, row in largest)
        return said, all(error <= bound * SCALE[row.dtype] for error, row in largest)

    return Claim(text, judge)


def _told_apart(measured: Measured) -> tuple[str, bool]:
    """Judges whether the errors would tell, had dweight and dbias been exchanged."""
    ours, exchanged = (
        [(row.dweight, row.dbias) for row in measured.gradients if row.layer == layer]
        for layer in (names.OURS, EXCHANGED)
    )
    most, least = np.nanmax(ours), np.nanmin(exchanged)
    return f"errors up to {most:.1e}; exchanged, from {least:.1e}", bool(most < 0.01 * least)


_DWEIGHT = "3. dweight to 1e-7 of sum abs(dy) (1 + 4.3 abs(xhat))"
_SAME = "7. the same as batch norm of the reshaped input, to 1e-6"
CLAIMS = (
    _within("1. OneFlow's pair gives 0.8454, to 1e-6", Y, "pair", "error", "{y:.7f}"),
    _within("2. and its sum has a gradient of exactly 0", 0, "pair", "dx", "{dx:.1g}"),
    _within(_DWEIGHT, DWEIGHT, "gradients", "dweight", "{dweight:.1e}"),
    _within("4. dbias to 2e-7 of sum abs(dy)", DBIAS, "gradients", "dbias", "{dbias:.1e}"),
    _within("5. dx to 1e-6 of max abs(dy weight) / std", DX, "gradients", "dx", "{dx:.1e}"),
    Claim("6. dweight and dbias are not exchanged", _told_apart),
    _within(_SAME, Y, "by_batch_norm", "difference", "{difference:.1g}"),
)
