"""Tests that the script sees what a layer does, and that each claim follows what it saw."""

import numpy as np
import pytest

from experiments.lab import rows
from experiments.lab.experiment import COMMITTED, Files
from experiments.lab.peers import names
from experiments.state_consistency.__main__ import EXPERIMENT, WHOLE, settings
from experiments.state_consistency.claims import CLAIMS, JIT, OP_BY_OP, Row
from experiments.state_consistency.script import WAYS, InJax, play, subject

FILES = Files(COMMITTED, "state_consistency")
ROW = Row(names.OURS, "auto", "float32", (2, 3, 4), JIT, backward=False)


@pytest.mark.long
def test_quick_runs_every_way_and_equinox_keeps_nan_for_ever(tmp_path):
    assert EXPERIMENT.main(["--quick", "--out", str(tmp_path)]) == 0
    files = Files(tmp_path, "state_consistency")
    found = rows.load(files.csv(), Row)
    ours = {(row.way, row.backward) for row in found if row.layer == names.OURS}
    assert ours == {(way, backward) for way in WAYS for backward in (False, True)}
    unlike = [verdict.unlike for verdict in EXPERIMENT.report(files).verdicts]
    assert unlike[:3] == [""] * 3
    assert unlike[10:] == ["Equinox ema, Equinox batch"] * 2


class Twice(InJax):
    def train(self, x):
        super().train(x)
        return super().train(x)


class InTheBackwardPass(InJax):
    """Learns only where a backward pass follows, as in MXNet #21111."""

    def train(self, x):
        before = self._memory
        y, *gradients = super().train(x)
        if not gradients:
            self._memory = before
        return [y, *gradients]


class WhileEvaluating(InJax):
    def evaluate(self, x):
        self.train(x)
        return super().evaluate(x)


@pytest.mark.parametrize(
    ("layer", "updates", "changed"),
    [(InJax, 1, 0), (Twice, 2, 0), (InTheBackwardPass, 0, 0), (WhileEvaluating, 2, 1)],
)
def test_the_script_counts_updates(layer, updates, changed):
    row = play(layer(ROW), ROW)
    assert round(row.updates_1) == updates
    assert row.evaluation_changed == changed
    assert round(play(layer(ROW._replace(backward=True)), ROW).updates_1) == (updates or 1)


@pytest.mark.parametrize("unbiased", [False, True])
def test_the_script_sees_which_variance_is_taken_in(unbiased):
    row = ROW._replace(layer=names.OURS_UNBIASED if unbiased else names.OURS)
    found = play(subject(row), row)
    assert found.mean_error < 1e-6
    assert found.variance_error < 1e-6
    assert max(found.biased_error, found.unbiased_error) > 0.1


OURS = {"layer": names.OURS, "batch": "finite"}
SCAN, FROM_ONE = {**OURS, "way": "scan, jit"}, {**OURS, "shape": (1, 6)}
UNBIASED_FROM_ONE = {"layer": names.OURS_UNBIASED, "shape": (1, 6)}
# What becomes of the committed rows that have these values; which claims then fail.
CASES = [
    ({}, {}, set()),
    ({**OURS, "way": OP_BY_OP}, {"raised": "TypeError: no"}, {1}),
    (UNBIASED_FROM_ONE, {"evaluation_changed": True}, {2}),
    (OURS, {"updates_1": 0.0}, {3}),
    (OURS, {"updates_2": 2.0}, {3}),
    (SCAN, {"memory_1": "other bits"}, {4}),
    (SCAN, {"memory_2": lambda row: row.memory_1}, {5}),
    (OURS, {"difference": 0.0}, {6}),
    (SCAN, {"difference": 9.0}, {6}),
    (OURS, {"mean_error": 2e-6}, {7}),
    (OURS, {"mean_error": np.nan}, {7}),
    (OURS, {"biased_error": 2e-6}, {8}),
    (OURS, {"unbiased_error": 2e-6}, set()),
    (FROM_ONE, {"nonfinite_training": 1}, {9}),
    (FROM_ONE, {"nonfinite_evaluation": 1}, {9}),
    (UNBIASED_FROM_ONE, {"raised": "RuntimeError: no"}, {10}),
    (UNBIASED_FROM_ONE, {"while_tracing": False}, {10}),
    (UNBIASED_FROM_ONE, {"memory_1": "touched"}, {10}),
    ({**OURS, "batch": "nan"}, {"rejected": 0.0}, {11}),
    ({**OURS, "batch": "inf"}, {"memory_2": "touched"}, {11}),
    ({**OURS, "batch": "3e38"}, {"nonfinite_later": 1}, {12}),
]


@pytest.mark.parametrize(("where", "columns", "failing"), CASES)
def test_a_verdict_follows_its_rows(where, columns, failing):
    found = []
    for row in rows.load(FILES.csv(), Row):
        if all(getattr(row, name) == value for name, value in where.items()):
            row = row._replace(**{k: v(row) if callable(v) else v for k, v in columns.items()})
        found.append(row)
    verdicts = [claim.verdict(found) for claim in CLAIMS]
    assert {int(v.claim.partition(".")[0]) for v in verdicts if not v.holds} == failing


def test_the_committed_results_are_of_every_row():
    setting = slice(Row._fields.index("raised"))
    found = [row[setting] for row in rows.load(FILES.csv(), Row)]
    assert found == [row[setting] for row in settings(WHOLE)]


@pytest.mark.peers
@pytest.mark.parametrize("name", [names.LINEN, names.NNX, names.TORCH, names.TORCH_OPERATOR])
def test_what_the_peers_do(name):
    """Each is called as it should be: its means and variances are those of the batch."""
    torch = names.package(name) == "torch"
    once = Row(name, "", "float32", (1, 2, 3), OP_BY_OP if torch else JIT, backward=True)
    again = once._replace(way="checkpoint, op by op" if torch else "checkpoint, jit")
    bad, one = once._replace(batch="nan"), once._replace(shape=(1, 6))
    once, again, bad, one = (play(subject(row), row) for row in (once, again, bad, one))
    assert not once.evaluation_changed
    np.testing.assert_allclose([once.updates_1, once.updates_2], 1, atol=1e-3)
    assert once.mean_error < 1e-6
    assert once.variance_error < 1e-5
    assert max(once.biased_error, once.unbiased_error) > 0.1
    # A second forward pass, for the backward pass: functions do not mind it, objects do.
    assert round(again.updates_1) == (2 if torch else 1)
    assert bad.memory_1 != bad.memory_2
    assert bad.nonfinite_later > 0
    assert one.raised.startswith("ValueError: Expected more than 1") == (name == names.TORCH)
    if name == names.TORCH:
        assert one.memory_0 != one.memory_1  # it has counted the batch
    assert (one.nonfinite_evaluation > 0) == (name == names.TORCH_OPERATOR)
