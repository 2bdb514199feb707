"""What this layer claims of layer norm, each with what was measured."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from . import layer_norm_gradients, layer_norm_speed
from .layer_norm_gradients import EXCHANGED
from .layer_norm_layers import OURS
from .layer_norm_measured import Measured

# A few roundings: those of experiments.accuracy, of float32; float64 has 29 bits more.
Y, DX, DWEIGHT, DBIAS = 1e-6, 1e-6, 1e-7, 2e-7
SCALE = {"float32": 1.0, "bfloat16": 1.0, "float64": 2.0**-29}


class Verdict(NamedTuple):
    claim: str
    measured: str
    holds: bool | None  # None: it was not measured


def judge(measured: Measured) -> list[Verdict]:
    pair = [row for row in measured.pair if row.layer == OURS]
    gradients = [row for row in measured.gradients if row.layer == OURS]
    exchanged = [row for row in measured.gradients if row.layer == EXCHANGED]
    return [
        Verdict(
            "1. OneFlow's pair gives 0.8454, to 1e-6",
            ", ".join(f"{row.y:.7f} ({row.dtype})" for row in pair),
            all(row.error <= Y * SCALE[row.dtype] for row in pair),
        ),
        Verdict(
            "2. and its sum has a gradient of exactly 0",
            ", ".join(f"{row.dx:.1g} ({row.dtype})" for row in pair),
            all(row.dx == 0 for row in pair),
        ),
        _worst(
            "3. dweight to 1e-7 of sum abs(dy) (1 + 4.3 abs(xhat))",
            gradients,
            "dweight",
            DWEIGHT,
        ),
        _worst("4. dbias to 2e-7 of sum abs(dy)", gradients, "dbias", DBIAS),
        _worst("5. dx to 1e-6 of max abs(dy weight) / std", gradients, "dx", DX),
        _told_apart(gradients, exchanged),
        Verdict(
            "7. the same as batch norm of the reshaped input, to 1e-6",
            ", ".join(
                f"{row.difference:.1g} ({row.dtype})"
                for row in measured.by_batch_norm
                if row.layer == OURS
            ),
            all(
                row.difference <= Y * SCALE[row.dtype]
                for row in measured.by_batch_norm
                if row.layer == OURS
            ),
        ),
        _speed(measured.speed),
    ]


def _worst(
    claim: str, rows: Iterable[layer_norm_gradients.Row], quantity: str, bound: float
) -> Verdict:
    worst: dict[str, float] = {}
    for row in rows:
        error = getattr(row, quantity)
        if not np.isnan(error):
            worst[row.dtype] = max(worst.get(row.dtype, 0.0), error)
    return Verdict(
        claim,
        ", ".join(f"{error:.1e} ({dtype})" for dtype, error in worst.items()),
        all(error <= bound * SCALE[dtype] for dtype, error in worst.items()),
    )


def _told_apart(
    ours: Iterable[layer_norm_gradients.Row], exchanged: Iterable[layer_norm_gradients.Row]
) -> Verdict:
    """Whether the errors would tell, had dweight and dbias been exchanged."""
    least = np.nanmin([[row.dweight, row.dbias] for row in exchanged])
    most = np.nanmax([[row.dweight, row.dbias] for row in ours])
    return Verdict(
        "6. dweight and dbias are not exchanged",
        f"errors up to {most:.1e}; exchanged, from {least:.1e}",
        bool(most < 0.01 * least),
    )


def _speed(rows: list[layer_norm_speed.Row]) -> Verdict:
    claim = "8. f32, forward + backward: faster than Equinox's (geometric mean)"
    found = [
        ratio
        for (_, dtype, program), ratio in layer_norm_speed.ratios(rows, "Equinox").items()
        if dtype == "f32" and program == "forward + backward"
    ]
    if not found:
        return Verdict(claim, "not measured", None)
    mean = float(np.exp(np.mean(np.log(found))))
    return Verdict(
        claim, f"{mean:.2f} of its time ({min(found):.2f} to {max(found):.2f})", mean < 1
    )
