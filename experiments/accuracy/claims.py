"""Judges what this package claims of its accuracy by the worst that was measured."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from experiments.lab.claims import Claim, worst
from experiments.lab.peers import names

from . import approaches, cases
from .cases import CONSTANT, GROUPS, HALF

# float32 has a relative precision of 6e-8: these leave room for a few roundings of numbers of
# order 1, whatever the mean and the number of values.
Y = DX = 1e-6
VARIANCE, DWEIGHT, DBIAS = 5e-7, 1e-7, 2e-7
SINGLE = [group for group in GROUPS if group != HALF]  # in float32
OTHER = [group for group in SINGLE if group != CONSTANT]
# How `raised` begins where a kernel that was asked for by name does not take the batch.
NOT_SERVED = "not served: "


class Row(NamedTuple):
    """Holds the errors of `lab.exact.Errors`; NaN where a layer raised or has nothing."""

    case: str
    layout: str
    layer: str
    y: float = np.nan
    variance: float = np.nan
    dx: float = np.nan
    dweight: float = np.nan
    dbias: float = np.nan
    nonfinite: float = np.nan
    raised: str = ""  # why there are no errors


def _within(
    text: str, quantities: tuple[str, ...], bound: float, groups: Collection[str] = GROUPS
) -> Claim:
    """Returns the claim that these errors of this package are within the bound."""

    def judge(rows: Sequence[Row]) -> tuple[str, bool]:
        ours = [row for row in rows if names.package(row.layer) == "eqx_norm"]
        # NaN is what could not be measured where a layer raised, and what it does not have.
        found = [
            (getattr(row, quantity), row)
            for row in ours
            if cases.BY_NAME[row.case].group in groups and not row.raised.startswith(NOT_SERVED)
            for quantity in quantities
            if row.raised or not np.isnan(getattr(row, quantity))
        ]
        error, (_, row) = worst(found, lambda one: one[0])
        place = [row.case]
        if len({(row.layer, row.layout) for row in ours}) > 1:
            place += [row.layer, row.layout]
        said = "0 in every case" if error == 0 else f"{error:.1e} ({'; '.join(place)})"
        return said, error <= bound

    return Claim(text, judge)


def _approaches(rows: Sequence[approaches.Row]) -> tuple[str, bool]:
    error, row = worst(rows, lambda row: row.error)
    where = f"{row.approach}, {row.use}, mean/std = {cases.power(row.ratio)}"
    return f"{error:.1e} ({where})", error <= Y


CLAIMS = (
    _within("1. a constant channel gives exactly its bias", ("y",), 0, [CONSTANT]),
    _within("2. and has a variance of exactly 0", ("variance",), 0, [CONSTANT]),
    _within("3. y to 1e-6 of max(1, abs(xhat))", ("y",), Y, OTHER),
    _within("4. variance to 5e-7 of variance + eps", ("variance",), VARIANCE),
    _within("5. dx to 1e-6 of max abs(dy) * weight / std", ("dx",), DX, SINGLE),
    _within("6. dweight to 1e-7 of sum abs(dy) + 4.3 abs(dweight)", ("dweight",), DWEIGHT),
    _within("7. dbias to 2e-7 of sum abs(dy)", ("dbias",), DBIAS),
    _within("8. half precision: 3 and 5 plus half an ulp", ("y", "dx"), Y, [HALF]),
    _within("9. nothing is NaN or infinite", ("nonfinite",), 0),
)
EVERY_APPROACH = Claim(
    "10. y to 1e-6 of max(1, abs(xhat)), by every approach, in training and inference",
    _approaches,
)
