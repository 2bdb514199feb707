"""The measured errors: of every case and layer, and as a file."""

import csv
from collections import defaultdict
from pathlib import Path

import numpy as np

from . import results
from .accuracy_reference import Errors

# By the names of case and layer.
Measured = dict[str, dict[str, Errors]]


def text(error: float) -> str:
    return "fails" if np.isnan(error) else f"{error:.3g}"


def save(path: Path, measured: Measured) -> None:
    """One row per case, layer and quantity; `fails` where the layer raised."""
    rows = [
        (case, layer, quantity, text(error))
        for case, layers in measured.items()
        for layer, errors in layers.items()
        for quantity, error in errors._asdict().items()
    ]
    results.write_csv(path, ("case", "layer", "quantity", "error"), rows)


def load(path: Path) -> Measured:
    """What `save` wrote."""
    read: defaultdict[str, defaultdict[str, dict[str, float]]]
    read = defaultdict(lambda: defaultdict(dict))
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            error = np.nan if row["error"] == "fails" else float(row["error"])
            read[row["case"]][row["layer"]][row["quantity"]] = error
    return {
        case: {layer: Errors(**errors) for layer, errors in layers.items()}
        for case, layers in read.items()
    }


def layers_of(measured: Measured) -> list[str]:
    return list(next(iter(measured.values())))
