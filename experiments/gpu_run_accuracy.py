"""The accuracy suite, compiled on the device at hand: every implementation of both layers.

The cases, the reference and the bounds are those of experiments/accuracy.py. A batch norm is
given the batch as it is; and with its channels last, repeated until they fill lines of memory,
since a Mosaic kernel takes nothing less. A layer norm is given each channel as a row, and has
to give the same, as long as there is no weight per channel; what it has no counterpart of (the
variance that is remembered, the gradients of weight and bias per channel) is not compared.
"""

import functools
import math
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from typing import Any

import numpy as np

from . import accuracy_claims
from .accuracy_cases import Batch, Case
from .accuracy_claims import Claim, Verdict
from .accuracy_peers import OURS
from .accuracy_reference import Answer, Errors, Reference, errors, reference, worst
from .gpu_run_contenders import BATCH_NORMS, LAYER_NORMS
from .gpu_run_job import FIRST, LAST, ROWS
from .gpu_run_programs import differentiated
from .gpu_run_rows import ACCURACY, Row, because

OF_ROWS = ("y", "dx", "nonfinite")
LINE = 128  # channels, of any dtype


def _variance(layer: Any, state: Any) -> Any:
    # The first batch is remembered to the bit.
    return state.get(layer.memory_index).variance


@functools.cache
def _batch_norm(name: str) -> Callable[..., tuple[Any, ...]]:
    return differentiated(lambda channels: BATCH_NORMS[name](channels, False), _variance)


@functools.cache
def _layer_norm(name: str) -> Callable[..., tuple[Any, ...]]:
    return differentiated(LAYER_NORMS[name])


def _of_batch_norm(name: str, batch: Batch, right: Reference) -> Errors:
    gave = _batch_norm(name)(batch.weight, batch.bias, batch.x, batch.dy)
    y, dx, dweight, dbias, variance = (np.asarray(array, np.float32) for array in gave)
    return errors(batch, right, Answer(y, variance, dx, dweight, dbias))


def _of_columns(name: str, batch: Batch, right: Reference) -> Errors:
    moved = np.moveaxis(batch.x, 1, -1)
    channels = moved.shape[-1]
    repeated = np.arange(-(-channels // LINE) * LINE) % channels
    x, dy = (
        np.moveaxis(a, 1, -1).reshape(-1, channels)[:, repeated] for a in (batch.x, batch.dy)
    )
    gave = _batch_norm(name)(batch.weight[repeated], batch.bias[repeated], x, dy)
    arrays = (np.asarray(array, np.float32)[..., :channels] for array in gave)
    y, dx, dweight, dbias, variance = arrays
    y, dx = (np.moveaxis(a.reshape(moved.shape), -1, 1) for a in (y, dx))
    return errors(batch, right, Answer(y, variance, dx, dweight, dbias))


def _of_layer_norm(name: str, batch: Batch, right: Reference) -> Errors:
    moved = (batch.x.shape[1], batch.x.shape[0], *batch.x.shape[2:])
    x, dy = (np.moveaxis(a, 1, 0).reshape(moved[0], -1) for a in (batch.x, batch.dy))
    ones = np.ones(x.shape[1], np.float32)
    y, dx, *_ = _layer_norm(name)(ones, 0 * ones, x, dy)
    y, dx = (np.moveaxis(np.asarray(a, np.float32).reshape(moved), 0, 1) for a in (y, dx))
    found = errors(batch, right, right.answer._replace(y=y, dx=dx))
    return found._replace(variance=math.nan, dweight=math.nan, dbias=math.nan)


OF = {FIRST: _of_batch_norm, LAST: _of_columns, ROWS: _of_layer_norm}


def measure(case: Case, names: Iterable[str], pool: Executor) -> list[Row]:
    """The errors of both layers in one case, by each of these implementations."""
    given = [(batch, reference(batch)) for batch in map(case.batch, range(case.draws))]

    def rows(layout: str, name: str) -> list[Row]:
        row = Row(ACCURACY, case.name, layout, case.dtype, "", name)
        try:
            found = worst([OF[layout](name, *each) for each in given])
        except Exception as error:  # whatever it is, the others are to be measured
            return [because(row, error)]
        return [
            Row(ACCURACY, case.name, layout, case.dtype, quantity, name, value=value)
            for quantity, value in found._asdict().items()
            if not math.isnan(value)
        ]

    # A row of layer norm has a weight of its own, and none per channel.
    layouts = (FIRST, LAST) if case.affine else (FIRST, LAST, ROWS)
    kinds = [(layout, name) for layout in layouts for name in names]
    return [row for each in pool.map(lambda kind: rows(*kind), kinds) for row in each]


def judge(rows: Iterable[Row]) -> dict[tuple[str, str], list[Verdict]]:
    """What experiments/accuracy.py claims, of every layout and contender that was measured."""
    found: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    for row in rows:
        if row.part == ACCURACY and not row.note:
            cases = found.setdefault((row.layout, row.contender), {})
            cases.setdefault(row.what, {})[row.program] = row.value
    blank = dict.fromkeys(Errors._fields, math.nan)
    return {
        key: [
            claim.judge({case: {OURS: Errors(**{**blank, **e})} for case, e in cases.items()})
            for claim in _claims(key[0])
        ]
        for key, cases in found.items()
    }


def _claims(layout: str) -> list[Claim]:
    of = OF_ROWS if layout == ROWS else Errors._fields
    return [claim for claim in accuracy_claims.CLAIMS if set(claim.quantities) <= set(of)]
