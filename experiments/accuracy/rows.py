"""Defines what is measured of one layer in one case."""

from typing import NamedTuple

from numpy import nan

NOT_SERVED = "not served: "


class Row(NamedTuple):
    """Holds the errors of `lab.exact.Errors`; NaN where a layer raised or has nothing."""

    case: str
    layout: str
    layer: str
    y: float = nan
    variance: float = nan
    dx: float = nan
    dweight: float = nan
    dbias: float = nan
    nonfinite: float = nan
    raised: str = ""  # why there are no errors

    @property
    def served(self) -> bool:
        """Returns whether a kernel that was asked for by name took the batch."""
        return not self.raised.startswith(NOT_SERVED)
