"""Judges what this package claims of layer norm by what was measured."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.lab import rows
from experiments.lab.claims import Claim, worst
from experiments.lab.experiment import Files
from experiments.lab.peers import names
from experiments.lab.rows import by

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


def _of_layer(found: Sequence[Any], layer: str = names.OURS) -> list[Any]:
    return [row for row in found if row.layer == layer]


def _within(
    bound: float, part: str, quantity: str, form: str = ".1e", say: str = ""
) -> Callable[[Measured], tuple[str, bool]]:
    """Judges whether the quantity is within the bound, and says it, or `say`, by dtype."""

    def judge(measured: Measured) -> tuple[str, bool]:
        ours = _of_layer(getattr(measured, part))
        if part == "gradients":  # where there is no weight, or no bias
            ours = [row for row in ours if not np.isnan(getattr(row, quantity))]
        largest = {
            dtype: worst(of, lambda row: getattr(row, quantity))
            for dtype, of in by(ours, lambda row: row.dtype).items()
        }
        said = ", ".join(
            f"{format(getattr(row, say or quantity), form)} ({dtype})"
            for dtype, (_, row) in largest.items()
        )
        return said, all(error <= bound * SCALE[dtype] for dtype, (error, _) in largest.items())

    return judge


def _told_apart(measured: Measured) -> tuple[str, bool]:
    """Judges whether the errors would tell, had dweight and dbias been exchanged."""
    ours, exchanged = (
        [[row.dweight, row.dbias] for row in _of_layer(measured.gradients, layer)]
        for layer in (names.OURS, EXCHANGED)
    )
    most, least = np.nanmax(ours), np.nanmin(exchanged)
    return f"errors up to {most:.1e}; exchanged, from {least:.1e}", bool(most < 0.01 * least)


CLAIMS = (
    Claim(
        "1. OneFlow's pair gives 0.8454, to 1e-6", _within(Y, "pair", "error", ".7f", say="y")
    ),
    Claim("2. and its sum has a gradient of exactly 0", _within(0, "pair", "dx", ".1g")),
    Claim(
        "3. dweight to 1e-7 of sum abs(dy) (1 + 4.3 abs(xhat))",
        _within(DWEIGHT, "gradients", "dweight"),
    ),
    Claim("4. dbias to 2e-7 of sum abs(dy)", _within(DBIAS, "gradients", "dbias")),
    Claim("5. dx to 1e-6 of max abs(dy weight) / std", _within(DX, "gradients", "dx")),
    Claim("6. dweight and dbias are not exchanged", _told_apart),
    Claim(
        "7. the same as batch norm of the reshaped input, to 1e-6",
        _within(Y, "by_batch_norm", "difference", ".1g"),
    ),
)
