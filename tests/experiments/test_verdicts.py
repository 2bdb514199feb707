"""Tests that each verdict holds for some rows, and fails for others."""

from functools import partial

import numpy as np
import pytest

from experiments import accuracy, determinism, distributed, layer_norm, speed, stability
from experiments import state_consistency as state
from experiments import variance_clipping as clipping
from experiments.common import peers
from experiments.stability import ADAM, BATCH, EMA, EMA_LOW, SMOOTH, SMOOTHER

RUN = determinism.Result(determinism.RECIPE, "run 1", "1.0", "aa", "0.5", "", (0, 0), (0,))
OTHER = RUN._replace(run="before step 1", fingerprint="bb", parts="step 1: `loss` forward")
FOUND = OTHER._replace(parts="step 1: `weights.linear2.weight` forward")
COST = determinism.Cost("small", determinism.OUTPUTS, 12, 96, 0, True, 1.03, 0.9, 1.2)

ROW = state.Row(peers.OURS, "float32", (2, 3, 4), state.JIT, backward=False, updates=1)
ROW = ROW._replace(difference=4, mean_error=1e-7, biased_error=1e-7, unbiased_error=0.1)
ALONE = ROW._replace(shape=(1, 6))
INFINITE = ROW._replace(batch="inf", kept=True)

WITHIN = partial(accuracy.within, claim="", of="y dx", bound=1e-6, groups=["n"])
IS_FASTER = partial(speed.is_faster, other=peers.EQUINOX)


def erring(y, layer=peers.OURS):
    return accuracy.Row("n", "case", layer, accuracy.NOTHING._replace(y=y))


def measured(unit, value, peer=peers.OURS_SEPARATE, shape="64x64"):
    return speed.Row(speed.BATCH_NORM, shape, "float32", speed.BOTH, "", unit, peer, value)


def beside(unit, value):
    return [measured(unit, value), measured(unit, 3.0, peers.EQUINOX)]


@pytest.mark.parametrize(
    ("verdict", "holding", "failing"),
    [
        (WITHIN, [erring(1e-6), erring(9.0, peers.TORCH)], [erring(1e-6), erring(2e-6)]),
        (partial(determinism.judge_runs, determinism.NO_SEED), [RUN, OTHER], [RUN, RUN]),
        (partial(determinism.judge_runs, determinism.RECIPE), [RUN, RUN], [RUN, OTHER]),
        (partial(determinism.judge_runs, determinism.FAULT), [RUN, FOUND], [RUN, OTHER]),
        (determinism.judge_probes, [COST], [COST, COST._replace(callbacks=1)]),
        (speed.agree, [measured(speed.DEVIATION, 1e-6)], [measured(speed.DEVIATION, 1e-3)]),
        (speed.needs_little, beside(speed.TEMPORARIES, 3.0), beside(speed.TEMPORARIES, 3.1)),
        (IS_FASTER, beside(speed.MS, 2.9), beside(speed.MS, 3.1)),
        (state.one_update, [ROW], [ROW, ROW._replace(updates=2)]),
        (state.evaluation_reads, [ROW], [ROW, ROW._replace(evaluation_changed=True)]),
        (state.right_statistics, [ROW], [ROW, ROW._replace(mean_error=np.nan)]),
        (state.one_value_works, [ALONE], [ALONE, ALONE._replace(finite=False)]),
        (state.bad_kept_out, [INFINITE], [INFINITE, INFINITE._replace(kept=False)]),
    ],
)
def test_a_verdict_follows_its_rows(verdict, holding, failing):
    assert verdict(holding)[2]
    assert not verdict(failing)[2]


def test_goals_name_each_network():
    rows = [
        measured(speed.MS, ms, peer)._replace(layer=speed.NETWORK, program=f"critic, {use}")
        for use, ours in (("gradient", 3.0), ("inference of 1", 1.5))
        for peer, ms in ((peers.OURS_SEPARATE, ours), (peers.EQUINOX, 2.0))
    ]
    said = {aim: found for aim, found, _ in speed.goals(rows)}
    aim = "networks: at most 1.0 of Equinox's time"
    assert said == {aim: "critic, gradient: 1.50; critic, inference of 1: 0.75"}


ONE = distributed.Process(distributed.ONE, 1, 2, 0, 0, np.nan, 0.0, 1.0, "a", "b", "c")
SEVERAL = ONE._replace(run=distributed.SEVERAL, processes=2, code=1, seconds=0.1)
RESTORED = ONE._replace(run=distributed.RESTORED)


@pytest.mark.parametrize(
    ("row", "changed", "failing"),
    [
        (1, {}, []),
        (1, {"weights": "z"}, [0]),
        (0, {"first_memory": "z"}, [1]),
        (1, {"error": np.nan}, [2]),
        (1, {"seconds": 15.1}, [3]),
        (3, {"error": 1.1e-5}, [4]),
    ],
)
def test_distributed(row, changed, failing):
    rows = [ONE, SEVERAL, SEVERAL._replace(process=1, code=-9), RESTORED]
    rows[row] = rows[row]._replace(**changed)
    holds = [verdict[2] for verdict in distributed.judge(rows)]
    assert [i for i in range(5) if not holds[i]] == failing


PAIR = layer_norm.Pair("float32", peers.OURS, 0, 0.8454, 1e-6, 0)
GOOD = layer_norm.Gradients("float64", (2,), peers.OURS, 1e-17, np.nan, 1e-16)
EXCHANGED = GOOD._replace(layer=layer_norm.EXCHANGED, dweight=0.5)


@pytest.mark.parametrize(
    ("pair", "ours", "failing"),
    [
        (PAIR, GOOD, []),
        (PAIR._replace(error=2e-6), GOOD._replace(dbias=4e-16, dx=2e-15), [1, 4, 5]),
        (PAIR._replace(dx=1e-9), GOOD._replace(dweight=0.4), [2, 3, 6]),
    ],
)
def test_layer_norm(pair, ours, failing):
    verdicts = layer_norm.judge([pair, pair._replace(layer=peers.TORCH)], [ours, EXCHANGED])
    assert [int(claim[0]) for claim, _, holds in verdicts if not holds] == failing


# Peak and loss of each setting as the issue has them.
RIGHT = {BATCH: (2, 1), EMA: (20, 1.2), EMA_LOW: (2, 1), ADAM: (5, 1), SMOOTH: (2, 0.9)}
RIGHT[SMOOTHER] = (2, 1)


def curves(peak, loss):
    """Returns curves of three seeds and 20 steps, with the peak in the second step."""
    norms = np.where(np.arange(20) == 1, peak, 0.5 * peak)
    return {"largest_gradient_norm": np.tile(norms, (3, 1)), "loss": np.full((3, 1), loss)}


@pytest.mark.parametrize(
    ("verdict", "wrong"),
    [
        (stability.ema_spikes, {EMA: (3, 1.2)}),
        (stability.low_ema_trains, {EMA_LOW: (2, 1.1)}),
        (stability.adam_still_spikes, {ADAM: (3, 1)}),
        (stability.smooth_is_better, {SMOOTH: (6, 0.9)}),
        (stability.smooth_is_batch, {SMOOTHER: (2, 1.1)}),
    ],
)
def test_stability(verdict, wrong):
    right = {setting: curves(*numbers) for setting, numbers in RIGHT.items()}
    assert verdict(right)[2]
    assert not verdict(right | {setting: curves(*n) for setting, n in wrong.items()})[2]


def test_with_four_norm_layers_ema_at_a_half_lags():
    of_ema = {loss: {BATCH: curves(2, 1), EMA_LOW: curves(2, loss)} for loss in (1.0, 1.1)}
    assert [stability.low_ema_trains(of_ema[loss], "large")[2] for loss in of_ema] == [0, 1]


BAD = clipping.Cell("A1 B ruined", 50, 50, 99, 0.3, 9)
CLEAN = clipping.Cell("", 0, 0, 1, 0.9, 1.1)
FELL = BAD._replace(failures="ruined")


@pytest.mark.parametrize(
    ("verdict", "corruption", "holding", "failing"),
    [
        (clipping.failures_happen, clipping.LOUD, (BAD, CLEAN), (CLEAN, BAD)),
        (clipping.bounded, clipping.FAINT, (BAD, CLEAN), (BAD, BAD)),
        (clipping.survived, clipping.ONE_IMAGE, (BAD, CLEAN), (BAD, FELL)),
        (clipping.price, clipping.SCALED, (CLEAN, BAD), (BAD, BAD)),
        (clipping.mean_stays, clipping.LOUD, (BAD, BAD), (BAD, CLEAN)),
        (clipping.clean_stays, clipping.CLEAN, (CLEAN, CLEAN), (CLEAN, BAD)),
    ],
)
def test_variance_clipping(verdict, corruption, holding, failing):
    assert verdict({("batch", corruption): holding})[2]
    assert not verdict({("batch", corruption): failing})[2]


@pytest.mark.parametrize(("high", "count"), [(1.4, 1), (1.6, 0)])
def test_only_ranges_that_are_apart_are_beyond_the_spread(high, count):
    ours = measured(speed.MS, 2.0, peers.OURS)._replace(low=1.5)
    theirs = measured(speed.MS, 1.0, peers.EQUINOX)._replace(high=high)
    assert speed.beyond_the_spread([ours, theirs], peers.EQUINOX, 1.0) == count
