"""Measures layer normalisation and its gradients: OneFlow #6149 with this layer and its peers.

    python -m experiments.layer_norm           the whole job: under 2 minutes, 2 cores
    python -m experiments.layer_norm --quick   under 30 seconds; fails if a claim fails

(a) The pair of that issue, [-1.83965693, -1.82964566] at eps = 1e-5: its output, and the
    gradient of the sum of its output, which is exactly 0.
(b) The gradients of weight and bias over shapes of 1 to 4 dimensions, with and without either,
    in float32, float64 and bfloat16, against extended precision. OneFlow had exchanged them,
    so the error of the right answer with both exchanged stands beside the others.
(c) Layer norm made of a batch norm of the reshaped input, as OneFlow's was, beside layer norm.

Compared are Equinox's, Flax's and PyTorch's layers. The issue:
https://github.com/Oneflow-Inc/oneflow/issues/6149. The time it takes: experiments.speed.
"""

import functools
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from experiments.lab import answers, exact, peers, rows
from experiments.lab.claims import judge, verdicts_table
from experiments.lab.exact import Batch
from experiments.lab.experiment import Experiment, Files, Report
from experiments.lab.peers import names
from experiments.lab.tables import grid, listing

from . import cases, claims, figures
from .claims import EXCHANGED, AtMean, ByBatchNorm, Gradients, Pair

PEERS = (names.OURS, names.EQUINOX, names.LINEN, names.LINEN_TWO_PASS, names.TORCH)
TWO_DTYPES = ("float32", "float64")
PAIR_COLUMNS = {
    "the pair in": "{dtype}",
    "layer": "{layer}",
    "output": "{y:.7f}",
    "its error": "{error:.1e}",
    "gradient of the sum": "{dx:.1e}",
}


@dataclass(frozen=True)
class Job:
    layers: tuple[str, ...] = PEERS
    dimensions: tuple[int, ...] = cases.DIMENSIONS


WHOLE = Job()
# Only what is installed wherever the package is.
QUICK = Job(PEERS[:2], (1, 2))


def measure(job: Job, files: Files) -> dict[str, Any]:
    # Nine digits, as float32 has: what is compared with 0.8454272 is a number, no error.
    save = functools.partial(rows.save, digits=9)
    save(files.csv("_pair"), Pair, _pair(job.layers))
    save(files.csv("_means"), AtMean, _means(job.layers))
    save(files.csv("_gradients"), Gradients, _gradients(job))
    save(files.csv("_by_batch_norm"), ByBatchNorm, _by_batch_norm(job.layers))
    return {"bits of the reference's mantissa": exact.MANTISSA}


def _pairs(layer: str, batch: Batch) -> list[tuple[float, ...]]:
    """Returns the second output of each pair, and its largest error and gradient."""
    gave, right = answers.layer_norm(layer, batch), exact.layer_norm(batch).answer
    columns = gave.y[:, 1], np.abs(gave.y - right.y).max(1), np.abs(gave.dx).max(1)
    return [tuple(map(float, pair)) for pair in zip(*columns, strict=True)]


def _pair(layers: Sequence[str]) -> Iterator[Pair]:
    for dtype, layer in itertools.product(TWO_DTYPES, layers):
        yield Pair(dtype, layer, *_pairs(layer, cases.pair(dtype))[0])


def _means(layers: Sequence[str]) -> Iterator[AtMean]:
    for layer in layers:
        for mean, (_, error, dx) in zip(cases.MEANS, _pairs(layer, cases.pairs()), strict=True):
            yield AtMean(layer, float(mean), error, dx)


def _gradients(job: Job) -> Iterator[Gradients]:
    given = [(d, batch) for d in cases.DTYPES for batch in cases.batches(d, job.dimensions)]
    for dtype, batch in tqdm(given, desc="gradients", unit="batch", disable=None):
        right = exact.layer_norm(batch)
        gave = {layer: answers.layer_norm(layer, batch) for layer in job.layers}
        gave[EXCHANGED] = right.answer._replace(
            dweight=None if batch.weight is None else right.answer.dbias,
            dbias=None if batch.bias is None else right.answer.dweight,
        )
        for layer, answer in gave.items():
            off = exact.errors(batch, right, answer)
            yield Gradients(dtype, batch.x.shape[1:], layer, off.dweight, off.dbias, off.dx)


def _by_batch_norm(layers: Sequence[str]) -> Iterator[ByBatchNorm]:
    drawn = [np.random.RandomState(0).normal(3, 2, shape) for shape in cases.SHAPES]
    for dtype, layer in itertools.product(TWO_DTYPES, layers):
        differences = []
        for x in (values.astype(dtype) for values in drawn):
            y = answers.layer_norm(layer, Batch(x, x, None, None)).y
            # The examples for channels, in a batch of one.
            channels = x.reshape(1, len(x), -1)
            other = answers.batch_norm(layer, Batch(channels, channels, None, None)).y
            differences.append(np.max(np.abs(y - other.reshape(x.shape))))
        yield ByBatchNorm(dtype, layer, float(max(differences)))


def report(files: Files) -> Report:
    measured = claims.Measured(files)
    layers = list(dict.fromkeys(row.layer for row in measured.pair))
    verdicts = judge(claims.CLAIMS, measured)
    by_batch_norm = {
        (row.dtype, row.layer): f"{row.difference:.1e}" for row in measured.by_batch_norm
    }
    tables = (
        listing(measured.pair, PAIR_COLUMNS),
        _gradients_table(measured.gradients, layers),
        grid("layer norm - batch norm", TWO_DTYPES, layers, lambda *at: by_batch_norm[at]),
        verdicts_table(verdicts, "claim of this layer"),
    )
    single = {row.layer: row for row in measured.pair if row.dtype == "float32"}
    said = {layer: f"{row.y:.7f}, gradient {row.dx:.1g}" for layer, row in single.items()}
    return Report(
        "\n\n".join(tables),
        verdicts,
        ours=said.pop(names.OURS),
        peers="; ".join(f"{layer} {numbers}" for layer, numbers in said.items()),
    )


def _gradients_table(found: Sequence[Gradients], layers: Sequence[str]) -> str:
    of_kinds = rows.by(found, lambda row: (row.dtype, row.layer))
    lines = {
        f"{quantity}, {dtype}": (dtype, quantity)
        for dtype in dict.fromkeys(row.dtype for row in found)
        for quantity in ("dweight", "dbias", "dx")
    }

    def worst(line: tuple[str, str], layer: str) -> str:
        dtype, quantity = line
        if quantity == "dx" and layer == EXCHANGED:
            return ""
        return f"{np.nanmax([getattr(row, quantity) for row in of_kinds[dtype, layer]]):.1e}"

    return grid("largest error", lines, [*layers, EXCHANGED], worst)


EXPERIMENT = Experiment(
    name="layer_norm",
    about=__doc__,
    thread="[OneFlow #6149](https://github.com/Oneflow-Inc/oneflow/issues/6149): layer norm",
    whole=WHOLE,
    quick=QUICK,
    measure=measure,
    report=report,
    draw=figures.draw,
    present=peers.present_layers,
)

if __name__ == "__main__":
    sys.exit(EXPERIMENT.main())
