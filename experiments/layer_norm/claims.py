"""What this package claims of layer norm, each with what was measured."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from experiments.lab import rows
from experiments.lab.claims import Claim
from experiments.lab.experiment import Files
from experiments.lab.peers import names

from .rows import EXCHANGED, ByBatchNorm, Gradients, Pair

# A few roundings: those of experiments.accuracy, of float32; float64 has 29 bits more.
Y, DX, DWEIGHT, DBIAS = 1e-6, 1e-6, 1e-7, 2e-7
SCALE = {"float32": 1.0, "bfloat16": 1.0, "float64": 2.0**-29}


class Measured(NamedTuple):
    pair: list[Pair]
    gradients: list[Gradients]
    by_batch_norm: list[ByBatchNorm]


def load(files: Files) -> Measured:
    return Measured(
        rows.load(files.csv("_pair"), Pair),
        rows.load(files.csv("_gradients"), Gradients),
        rows.load(files.csv("_by_batch_norm"), ByBatchNorm),
    )


def of_layer(found: list, layer: str) -> list:
    """Returns the rows of that layer."""
    return [row for row in found if row.layer == layer]


def _pair_error(measured: Measured) -> tuple[str, bool]:
    ours = of_layer(measured.pair, names.OURS)
    said = ", ".join(f"{row.y:.7f} ({row.dtype})" for row in ours)
    return said, all(row.error <= Y * SCALE[row.dtype] for row in ours)


def _pair_gradient(measured: Measured) -> tuple[str, bool]:
    ours = of_layer(measured.pair, names.OURS)
    said = ", ".join(f"{row.dx:.1g} ({row.dtype})" for row in ours)
    return said, all(row.dx == 0 for row in ours)


def _gradient(quantity: str, bound: float) -> Callable[[Measured], tuple[str, bool]]:
    def judge(measured: Measured) -> tuple[str, bool]:
        worst: dict[str, float] = {}
        for row in of_layer(measured.gradients, names.OURS):
            error = getattr(row, quantity)
            if not np.isnan(error):
                worst[row.dtype] = max(worst.get(row.dtype, 0.0), error)
        said = ", ".join(f"{error:.1e} ({dtype})" for dtype, error in worst.items())
        return said, all(error <= bound * SCALE[dtype] for dtype, error in worst.items())

    return judge


def _told_apart(measured: Measured) -> tuple[str, bool]:
    """Judges whether the errors would tell, had dweight and dbias been exchanged."""
    ours, exchanged = (
        [[row.dweight, row.dbias] for row in of_layer(measured.gradients, layer)]
        for layer in (names.OURS, EXCHANGED)
    )
    most, least = np.nanmax(ours), np.nanmin(exchanged)
    return f"errors up to {most:.1e}; exchanged, from {least:.1e}", bool(most < 0.01 * least)


def _by_batch_norm(measured: Measured) -> tuple[str, bool]:
    ours = of_layer(measured.by_batch_norm, names.OURS)
    said = ", ".join(f"{row.difference:.1g} ({row.dtype})" for row in ours)
    return said, all(row.difference <= Y * SCALE[row.dtype] for row in ours)


CLAIMS = (
    Claim("1. OneFlow's pair gives 0.8454, to 1e-6", _pair_error),
    Claim("2. and its sum has a gradient of exactly 0", _pair_gradient),
    Claim(
        "3. dweight to 1e-7 of sum abs(dy) (1 + 4.3 abs(xhat))", _gradient("dweight", DWEIGHT)
    ),
    Claim("4. dbias to 2e-7 of sum abs(dy)", _gradient("dbias", DBIAS)),
    Claim("5. dx to 1e-6 of max abs(dy weight) / std", _gradient("dx", DX)),
    Claim("6. dweight and dbias are not exchanged", _told_apart),
    Claim("7. the same as batch norm of the reshaped input, to 1e-6", _by_batch_norm),
)
