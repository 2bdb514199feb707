"""Tests that a claim fails if its rows contradict it.

test_quick.py tests that all claims hold, except those of `speed` on times.
"""

import numpy as np
import pytest

from experiments import accuracy, determinism, speed, state_consistency
from experiments.accuracy import Row
from experiments.common import peers, rollout
from experiments.common.exact import Errors

RUN = determinism.Result(determinism.RECIPE, "run 1", "1.0", "aa", "0.5", "", (0, 0))
OTHER = RUN._replace(run="before step 1", fingerprint="bb", parts="step 1: `loss` forward")
SAME = rollout.Result("RMSNorm", "float32", peers.OURS, 384, 8, 256, 0, 0, 0, 0.0)
DIFFERENT = [SAME._replace(**{name: 1}) for name in ("y", "dx", "ratio")]
PAIR = accuracy.Pair("float32", peers.OURS, 0, 0.8454, 1e-6, 0)
LARGE = Errors(*[1e-5] * 5)
LINES = [(name, *[""] * len(state_consistency.COLUMNS)) for name in state_consistency.OURS]


def measured(unit, values, peer=peers.OURS_SEPARATE):
    where = speed.BATCH_NORM, "64x64", "float32", speed.BOTH, "", unit, peer
    return speed.Row(*where, np.array(values))


@pytest.mark.parametrize(
    "verdicts",
    [
        [
            accuracy.within([Row(claim[3][0], "case", 0, peers.OURS, LARGE)], *claim)
            for claim in accuracy.CLAIMS
        ],
        [accuracy.pair_is_right([PAIR._replace(error=2e-6)])],
        [accuracy.pair_is_right([PAIR._replace(dx=1e-9)])],
        [determinism.judge_runs(determinism.NO_SEED, [RUN, RUN])],
        [determinism.judge_runs(determinism.RECIPE, [RUN, OTHER])],
        [determinism.judge_runs(determinism.FAULT, [RUN, OTHER])],
        *([determinism.judge_rollouts([SAME, other])] for other in DIFFERENT),
        [*state_consistency.judge(LINES)],
        speed.judge([measured(speed.DEVIATION, [1e-3] * 2)], speed.QUICK),
    ],
)
def test_claims_fail_on_rows_that_contradict_them(verdicts):
    assert verdicts
    assert not any(holds for _, _, holds in verdicts)


@pytest.mark.parametrize("ours", [(2.9, 2.9), (3.1, 3.1), (2.9, 3.1), (3.1, 2.9)])
def test_speed_claims_and_goals_on_times(ours):
    """Checks that claims hold, and goals are missed, at both percentiles only."""
    rows = [measured(speed.DEVIATION, [1e-6] * 2)]
    for unit in (speed.MS, speed.TEMPORARIES):
        rows += [measured(unit, ours, name) for name in (peers.OURS, peers.OURS_SEPARATE)]
        rows += [measured(unit, [3.0] * 2, peers.EQUINOX)]
    rows += [measured(speed.MS, [3.0 / 1.1] * 2, peers.TORCH)]
    verdicts = {claim[0]: held for claim, _, held in speed.judge(rows, speed.Settings())}
    holds = max(ours) < 3
    assert verdicts == {"1": True, "2": holds, "3": holds, "5": False}
    (missed,) = (said for aim, said, _ in speed.goals(rows) if "any array" in aim)
    assert missed.endswith(f"percentiles: {int(min(ours) > 3)} of 1")
