"""Each claim on the speed of a GPU holds where its numbers reach it, and only there.

Those on a CPU are in test_claims.py, which edits committed results; of a GPU there are none.
"""

import dataclasses
from typing import Any

import pytest

from experiments.lab import rows
from experiments.lab.experiment import Files
from experiments.lab.peers import names
from experiments.speed import claims
from experiments.speed.__main__ import EXPERIMENT
from experiments.speed.cases import BOTH, FIRST, LARGE, LAST, ROWS
from experiments.speed.rows import Row
from tests.experiments.editing import Edit, edit, flipped

SHAPE, OTHER = (8, LARGE // 8), (9, LARGE // 8)
OURS, XLA = names.OURS, names.OURS_XLA
TIMES = {OURS: 1.0, XLA: 1.2, names.EQUINOX_BATCH: 2.0}
TIMES |= {names.TORCH: 1.5, names.TORCH_COMPILED: 1.1}


def spread(median) -> Any:
    return {"median": median, "low": 0.99 * median, "high": 1.01 * median, "calls": 1}


def timing(part, peer, median, layout=LAST, shape=SHAPE):
    row = Row("gpu", part, shape, "f32", layout, peer, BOTH, share=0.9)
    return dataclasses.replace(row, **spread(median))


@pytest.fixture
def files(tmp_path):
    """Returns results of which every claim holds."""
    found = [timing("time", OURS, 1.0, FIRST), timing("time", names.TORCH, 1.05, FIRST)]
    for peer, ms in TIMES.items():
        found += [timing("time", peer, ms), timing("time", peer, ms, shape=OTHER)]
        found += [timing("layer_norm", peer, ms, ROWS), timing("training", peer, ms, "")]
        found.append(Row("gpu", "bits", (8, 8), "f32", LAST, peer, differing=0.0, calls=100))
        found.append(Row("gpu", "agreement", (8, 8), "f32", LAST, peer, deviation=1e-6))
    files = Files(tmp_path, "speed_nvidia-h200")
    rows.save(files.csv(), Row, found)
    return files


def of(part, peer, **where):
    return lambda **columns: Edit({"part": part, "peer": peer} | where, columns)


def slow(part, peer, **where):
    """Returns an edit by which this package is slower than that peer."""
    return of(part, peer, **where)(**spread(0.9))


BATCH_NORM, LAYER_NORM = of("time", OURS, layout=LAST), of("layer_norm", OURS)
FIRST_OF_TWO = f"8x{LARGE // 8}"
CASES = [
    (of("bits", XLA)(differing=1), [1]),
    (of("agreement", XLA)(deviation=0.5, note="differs"), [2]),
    (BATCH_NORM(share=0.84), [3]),
    (of("time", OURS, layout=FIRST)(share=0.84), [4]),
    (LAYER_NORM(share=0.84), [5]),
    # A small array is not judged.
    (of("time", OURS, layout=LAST, shape=FIRST_OF_TWO)(share=0.1, shape="8x8"), []),
    (of("time", names.EQUINOX_BATCH)(**spread(1.4)), [6, 7]),
    # The average over Equinox's, and the least, are two claims.
    (of("time", names.EQUINOX_BATCH, shape=FIRST_OF_TWO)(**spread(1.3)), [7]),
    (slow("time", names.TORCH_COMPILED), [8]),
    (slow("layer_norm", names.TORCH), [9]),
    (slow("training", XLA), [10]),
    # Within what two timings of one program differ by, or within the quartiles.
    (of("training", XLA)(**spread(0.98)), []),
    (of("training", XLA)(median=0.9, low=0.8, high=1.1), []),
    (of("time", names.TORCH)(note="failed: x"), [11]),
]


@pytest.mark.parametrize(("change", "numbers"), CASES)
def test_each_verdict_follows_its_rows(change, numbers, files):
    assert flipped(EXPERIMENT, files, [change]) == dict.fromkeys(numbers, False)


def test_in_a_rehearsal_speed_is_not_judged(files):
    edit(files, [slow("time", XLA), Edit({}, {"device": "rehearsal"})])
    found = EXPERIMENT.report(files).verdicts
    silent = [i for i, v in enumerate(found, 1) if v.measured == "says nothing on a CPU"]
    assert silent == [i for i, v in enumerate(found, 1) if not v.quick] == list(range(3, 11))
    assert not [v for v in found if v.holds is False]


@pytest.mark.parametrize(
    ("device", "quick"), [("cpu", [1, 8, 15]), ("gpu", [11]), ("rehearsal", [11])]
)
def test_nothing_measured_is_not_called_good(device, quick):
    """And what --quick fails of does not depend on the machine, or was measured alone."""
    found = dict(enumerate(claims.verdicts([Row(device, "copy")]), 1))
    assert [i for i, verdict in found.items() if verdict.quick] == quick
    assert [i for i, verdict in found.items() if verdict.holds is not None] == [len(found)]


def test_a_time_that_was_the_hosts_is_said_to_be(files):
    edit(files, [slow("time", names.TORCH)])
    assert "waiting for the host" not in EXPERIMENT.report(files).text
    edit(files, [Edit({}, {"host": 0.95})])
    said = EXPERIMENT.report(files)
    assert "slower on 3 of 3, on 3 waiting for the host" in said.verdicts[7].measured
    assert "1.00* 90%" in said.text
