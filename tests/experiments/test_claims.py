"""Each claim follows its numbers: the committed results, edited, change its verdict alone.

An edit names rows of one of an experiment's CSV files and what their columns become. The base
of each experiment edits what it is about to be as claimed, so that no test depends on what
was measured. What state_consistency claims fails in test_state_consistency.py, of wrong layers;
what is claimed of speed in test_speed_claims.py, of rows made there.
"""

from typing import Any

import pytest

from experiments import __main__ as every
from experiments.lab.experiment import COMMITTED, Files
from tests.experiments.editing import Edit, edit, flipped, verdicts

EXPERIMENTS = {experiment.name: experiment for experiment in every.experiments()}


def copied(name: str, folder: Any) -> Files:
    """Returns a copy of an experiment's committed results, edited to be as claimed."""
    files = Files(folder, name)
    (folder / "results").mkdir()
    for path in (COMMITTED / "results").glob(f"{name}*"):
        (folder / "results" / path.name).write_bytes(path.read_bytes())
    edit(files, BASES[name])
    return files


def rows(suffix="", **where):
    """Returns a function that makes an edit of these rows."""
    return lambda **columns: Edit(where, columns, suffix)


def case(name):
    return rows(layer="eqx-norm", case=name)


def trained(approach, momentum, **where):
    return rows(approach=approach, momentum=momentum, **where)


def clipping(approach, clipped, corruption, **where):
    return rows(approach=approach, clipped=clipped, corruption=corruption, **where)


def moved(implementation, program="BatchNorm + ReLU", **where):
    return rows("_programs", implementation=implementation, program=program, **where)


def kernel(problem):
    return rows("_kernels", device="B200")(problem=problem)


ERRORS: dict[str, Any] = dict.fromkeys(
    ("y", "variance", "dx", "dweight", "dbias", "nonfinite"), 0
)
FINE = {
    **{"loss": 0.3, "gradient": 1.0, "variance": 1.0, "growth": 1.01},
    **dict.fromkeys(("accuracy_after", "accuracy_end", "test_after", "test_end"), 0.9),
}
# The three failures.
A1, A2 = {"gradient": 10.1}, {"accuracy_after": 0.49}
B = {"accuracy_end": 0.89, "test_end": 0.79}
BASES = {
    "accuracy": [Edit({}, ERRORS), Edit({}, {"error": 0}, "_approaches")],
    "layer_norm": [
        rows("_pair", layer="eqx-norm")(error=0, dx=0),
        rows("_gradients", layer="eqx-norm")(dweight=0, dbias=0, dx=0),
        rows("_by_batch_norm", layer="eqx-norm")(difference=0),
    ],
    "stability": [
        Edit({}, {"loss": 1, "largest_gradient_norm": 1}),
        trained("ema", "0.99")(loss=1.06),
        trained("ema", "0.99", step="5")(largest_gradient_norm=9),
        trained("adam", "0.99", step="5")(largest_gradient_norm=3),
    ],
    "variance_clipping": [
        Edit({}, FINE),
        clipping("batch", "False", "one image by 1e3")(**B),
        clipping("batch", "True", "scaled by 1e3")(**A1),
        clipping("batch", ("False", "True"), "constant 1e3")(**B),
        clipping("ema", "False", "scaled by 1e3")(growth=1e4),
    ],
    "determinism": [Edit({}, {"median": 1}, "_overhead")],
    "compiled": [
        Edit({}, {"units": 3}, "_programs"),
        Edit({"recomputes": "True"}, {"temporaries": 1}, "_memory"),
        Edit({}, {"seconds": 10}, "_memory"),
    ],
    "distributed": [
        Edit({}, {"first_memory": "a", "memory": "b", "weights": "c", "error": 0}),
        rows(run="several", code="1")(seconds=0.1),
    ],
}
# Nothing explodes or collapses; and what claim 9 finds is that 5 does not hold.
NOT_IN_BASE = {"variance_clipping": {1: False, 3: None, 4: None, 5: False}}

PAIR = rows("_pair", layer="eqx-norm", dtype="float32")
GRADIENTS = rows("_gradients", layer="eqx-norm", dtype="float32")
CONTRAST = clipping("ema", "False", "contrast by 1e3")
CLIPPED_CONTRAST = clipping("ema", "True", "contrast by 1e3")
CLIPPED_LOUD = clipping("batch", "True", "constant 1e3")
GROWTH = clipping("ema", "True", "scaled by 1e3")
PROBED = rows("_overhead", network="small", transport="outputs")
ON_OTHERS = rows(setting="the recipe, other devices", run=("1 device", "8 devices"))
ON_ONE_CORE = rows(setting="the recipe", run="on one core")
FAULT = rows(setting="the recipe, one bit flipped", run="before step 37")
SAME_BITS = {"fingerprint": "aa", "final_loss": 0.5, "by_step": "0"}
BETWEEN = "conv, BatchNorm + ReLU, conv"
XLA, PALLAS = "eqx-norm, xla", "eqx-norm, pallas"
COLUMNS, IMAGES = "65536x256", "64x64x32x32"
RATIO = case("mean/std = 1e0")
RAISED = dict.fromkeys(ERRORS, "")
# Some edits each, and what becomes of the claims whose verdict they change.
CASES: dict[str, list[tuple[Any, ...]]] = {
    "accuracy": [
        (case("constants to 1, n = 7")(y=1e-30), {1: False}),
        (case("constants, n = 9, affine")(variance=1e-30), {2: False}),
        (case("mean/std = 1e7")(y=1.1e-6), {3: False}),
        # In whichever layout; but not by others.
        (case("mean/std = 1e3")(y=2e-6, layout="channels last"), {3: False}),
        (Edit({"layer": "Equinox batch"}, {"y": 1}), {}),
        (case("outlier first")(variance=5.1e-7), {4: False}),
        (case("OneFlow's pair")(dx=1.1e-6), {5: False}),
        (case("n = 1e4")(dweight=1.1e-7), {6: False}),
        (case("n = 1e1")(dbias=2.1e-7), {7: False}),
        (case("float16, mean 300, std 1")(y=1.1e-6), {8: False}),
        (case("bfloat16, mean 100, std 1")(dx=1.1e-6), {8: False}),
        (RATIO(nonfinite=1), {9: False}),
        (RATIO(**RAISED, raised="ValueError: no"), dict.fromkeys((3, 4, 5, 6, 7, 9), False)),
        (RATIO(**RAISED, raised="not served: no"), {}),
        (Edit({"use": "inference"}, {"error": 1.1e-6}, "_approaches"), {10: False}),
    ],
    "layer_norm": [
        (PAIR(error=2e-3), {1: False}),
        (PAIR(dx=1e-12), {2: False}),
        (GRADIENTS(dweight=2e-7), {3: False}),
        (GRADIENTS(dbias=3e-7), {4: False}),
        (GRADIENTS(dx="inf"), {5: False}),
        (GRADIENTS(dweight=0.5), {3: False, 6: False}),
        (rows("_by_batch_norm", layer="eqx-norm")(difference=2e-6), {7: False}),
    ],
    "stability": [
        (trained("ema", "0.99")(loss=1.04), {1: False}),
        (trained("ema", "0.5")(loss=1.06), {2: False}),
        (trained("adam", "0.99")(largest_gradient_norm=1.9), {3: False}),
        (trained("smooth_start", "0.99")(loss=1.01), {4: False}),
        (trained("smooth_start", "0.9999", step="5")(largest_gradient_norm=9), {5: False}),
        # Beyond the first ten steps a spike is not what the issue is about.
        (trained("smooth_start", "0.9999", step="11")(largest_gradient_norm=9), {}),
    ],
    "variance_clipping": [
        (CONTRAST(**A1), {1: True, 3: True}),
        (CONTRAST(**A1), CLIPPED_CONTRAST(**A1), {1: True, 3: False}),
        (CONTRAST(**A2), {1: True, 4: True}),
        (CONTRAST(**A2), CLIPPED_CONTRAST(**A2), {1: True, 4: False}),
        (CONTRAST(gradient=""), {1: True, 3: True}),  # NaN is as wrong as can be
        # Of five seeds two are a minority.
        (clipping("ema", "False", "contrast by 1e3", seed=("0", "1"))(**A2), {}),
        (
            clipping("batch", "False", ("one image by 1e3", "constant 1e3"))(**FINE),
            {2: False, 5: None, 7: False, 9: False},
        ),
        # Growth of the running variance: at most 1 + 7 * 0.01 / (1 - 0.99^100) = 1.1104.
        (GROWTH(growth=1.112), {6: False}),
        (clipping("batch", "True", "one image by 1e3")(test_end=0.79), {7: False}),
        (clipping("batch", "True", "scaled by 1e3")(**FINE), {8: False}),
        (CLIPPED_LOUD(**FINE), {5: True, 9: False}),
        (clipping("smooth_start", "True", "none")(test_end=0.88), {10: False}),
    ],
    "determinism": [
        (rows(setting="no seed")(**SAME_BITS), {1: False}),
        (rows(setting="a seed", run="run 2")(fingerprint="aa"), {2: False}),
        (ON_ONE_CORE(fingerprint="aa"), {3: False}),
        (rows(setting="the recipe, 2 devices", run="run 2")(fingerprint="aa"), {4: False}),
        (ON_OTHERS(**SAME_BITS), {5: False}),
        (FAULT(parts="step 37: `norm` forward"), {6: False}),
        (PROBED(median=1.06), {7: False}),
    ],
    "compiled": [
        (moved(XLA, "BatchNorm + GELU")(units=8.3), {1: False}),
        (moved(XLA, BETWEEN)(layout_changes=9), {2: False}),
        (moved(PALLAS, "BatchNorm + SiLU", shape=COLUMNS)(units=7.3), {3: False}),
        (moved(PALLAS, "BatchNorm + SiLU", shape=IMAGES)(units=9.1), {}),
        (moved(PALLAS, "BatchNorm + SiLU", shape=IMAGES)(units=9.3), {4: False}),
        (moved(PALLAS, direction="forward", shape=COLUMNS)(units=3.1), {5: False}),
        (moved(PALLAS, BETWEEN)(layout_changes=9), {6: False}),
        (kernel("spills"), {7: False}),
        (kernel("atomics"), {8: False}),
        (kernel("no copies ahead"), {9: False}),
        (kernel("unfenced"), {10: False}),
        (Edit({}, {"recipe": "adds atomically"}, "_recipe"), {11: False}),
        (Edit({"program": "BatchNorm, ReLU"}, {"same": "False"}, "_recipe"), {12: False}),
        (Edit({"way": "jit", "layer": "eqx-norm"}, {"largest": 2049}, "_devices"), {13: False}),
        (Edit({"way": "jit", "masked": "True"}, {"sends": 6}, "_devices"), {14: False}),
        (Edit({"way": "shard_map"}, {"sends": 3}, "_devices"), {14: False}),
        (Edit({"recomputes": "True"}, {"kept": 10**10}, "_memory"), {15: False}),
        (Edit({"recomputes": "True"}, {"temporaries": 10**10}, "_memory"), {16: False}),
        (Edit({"recomputes": "True"}, {"moved": 10**11}, "_memory"), {17: False}),
        (Edit({"layer": "eqx-norm"}, {"seconds": 12.1}, "_memory"), {18: False}),
    ],
    "distributed": [
        (rows(run="several", process="1")(weights="z"), {1: False}),
        (rows(run="several", process="1")(memory="z"), {1: False}),
        (rows(run="one process")(first_memory="z"), {2: False}),
        (rows(run="several", process="1")(error=1.1e-5), {3: False}),
        (rows(run="several", code="1")(seconds=15.1), {4: False}),
        (rows(run="several", code="1")(code=0), {4: False}),
        (rows(run="restored")(error="inf"), {5: False}),
    ],
}


@pytest.mark.parametrize(
    ("name", "edits", "changed"),
    [(name, edits, changed) for name, of in CASES.items() for *edits, changed in of],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
def test_a_verdict_follows_its_numbers(name, edits, changed, tmp_path):
    assert flipped(EXPERIMENTS[name], copied(name, tmp_path), edits) == changed


@pytest.mark.parametrize("name", BASES)
def test_no_claim_is_without_a_case(name, tmp_path):
    found = verdicts(EXPERIMENTS[name], copied(name, tmp_path))
    assert found == dict.fromkeys(found, True) | NOT_IN_BASE.get(name, {})
    assert {claim for *_, changed in CASES[name] for claim in changed} == found.keys()
