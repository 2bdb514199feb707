"""Each claim follows its numbers: the committed results, edited, change its verdict alone.

An edit names rows of one of an experiment's CSV files and what their columns become. The base
of each experiment edits what it is about to be as claimed, so that no test depends on what
was measured. What state_consistency claims fails in test_state_consistency.py, of wrong layers.
"""

from typing import Any

import pytest

from experiments import __main__ as every
from experiments.accuracy import claims as accuracy
from experiments.lab.experiment import COMMITTED, Files
from experiments.stability import claims as stability
from experiments.state_consistency import claims as state_consistency
from experiments.variance_clipping import claims as variance_clipping
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


def of_ours(suffix="", **where):
    """Returns a function that makes an edit of rows of this package's."""
    return lambda **columns: Edit({"layer": "eqx-norm", **where}, columns, suffix)


def case(name):
    return of_ours(case=name)


def trained(approach, momentum, **where):
    return lambda **columns: Edit({"approach": approach, "momentum": momentum} | where, columns)


def clipping(approach, clipped, corruption, **where):
    setting = {"approach": approach, "clipped": clipped, "corruption": corruption}
    return lambda **columns: Edit(setting | where, columns)


def ran(setting, **where):
    return lambda **columns: Edit({"setting": setting} | where, columns)


def moved(implementation, program="BatchNorm + ReLU", **where):
    chosen = {"implementation": implementation, "program": program}
    return lambda **columns: Edit(chosen | where, columns, "_programs")


def timed(peer, part="time", **where):
    return lambda ms: Edit({"part": part, "peer": peer} | where, {"median": ms})


def compiled(part):
    return lambda **columns: Edit({"part": part, "peer": "eqx-norm"}, columns)


def number(row):
    """Returns the N of the shape of a row."""
    return int(row["shape"].partition("x")[0])


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
SPEEDS = {
    **{"eqx-norm": 10, "eqx-norm, device-invariant": 20, "Equinox ema": 40},
    **{"Equinox batch": 40, "Flax linen": 14, "Flax nnx": 14, "PyTorch": 15},
    **{"sum of its parts": 9.5, "memory copy": 2},
}
BASES = {
    "accuracy": [Edit({}, ERRORS), Edit({}, {"error": 0}, "_approaches")],
    "layer_norm": [
        of_ours("_pair")(error=0, dx=0),
        of_ours("_gradients")(dweight=0, dbias=0, dx=0),
        of_ours("_by_batch_norm")(difference=0),
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
    "compiled": [],
    "speed": [
        Edit({"part": "agreement"}, {"deviation": 1e-6, "note": ""}),
        Edit({"part": "compile"}, {"temporaries": 0, "compile_seconds": 0.2}),
        Edit({"part": "stack"}, {"compile_seconds": 5}),
        timed("eqx-norm", "growth")(number),
        *(timed(peer)(ms) for peer, ms in SPEEDS.items()),
        timed("eqx-norm", "layer_norm")(1),
        timed("Equinox", "layer_norm")(2),
    ],
}
# Nothing explodes or collapses; and what claim 9 finds is that 5 does not hold.
NOT_IN_BASE = {"variance_clipping": {1: False, 3: None, 4: None, 5: False}}

PAIR, GRADIENTS = of_ours("_pair", dtype="float32"), of_ours("_gradients", dtype="float32")
CONTRAST = clipping("ema", "False", "contrast by 1e3")
CLIPPED_CONTRAST = clipping("ema", "True", "contrast by 1e3")
CLIPPED_LOUD = clipping("batch", "True", "constant 1e3")
GROWTH = clipping("ema", "True", "scaled by 1e3")
ON_ONE_CORE = ran("the recipe", run="on one core")
FAULT = ran("the recipe, one bit flipped", run="before step 37")
SAME_BITS = {"fingerprint": "aa", "final_loss": 0.5, "by_step": "0"}
BETWEEN = "conv, BatchNorm + ReLU, conv"
TRITON, MOSAIC = "eqx-norm, pallas_triton", "eqx-norm, pallas_mosaic"
RAISED = dict.fromkeys(ERRORS, "")
# Some edits each, and what becomes of the claims whose verdict they change.
CASES: dict[str, list[tuple[Any, ...]]] = {
    "accuracy": [
        (case("constants to 1, n = 7")(y=1e-30), {1: False}),
        (case("constants, n = 9, affine")(variance=1e-30), {2: False}),
        (case("mean/std = 1e7")(y=1.1e-6), {3: False}),
        (case("mean/std = 1e3")(y="inf"), {3: False}),
        # By whichever implementation, in whichever layout; but not by others.
        (case("mean/std = 1e3")(y=2e-6, layout="channels last"), {3: False}),
        (case("mean/std = 1e3")(y=2e-6, layer="eqx-norm, xla"), {3: False}),
        (Edit({"layer": "Equinox batch"}, {"y": 1}), {}),
        (case("outlier first")(variance=5.1e-7), {4: False}),
        (case("OneFlow's pair")(dx=1.1e-6), {5: False}),
        (case("n = 1e4")(dweight=1.1e-7), {6: False}),
        (case("n = 1e1")(dbias=2.1e-7), {7: False}),
        (case("float16, mean 300, std 1")(y=1.1e-6), {8: False}),
        (case("bfloat16, mean 100, std 1")(dx=1.1e-6), {8: False}),
        (case("mean/std = 1e0")(nonfinite=1), {9: False}),
        (
            case("mean/std = 1e0")(**RAISED, raised="ValueError: no"),
            dict.fromkeys((3, 4, 5, 6, 7, 9), False),
        ),
        (case("mean/std = 1e0")(**RAISED, raised="not served: no"), {}),
        (Edit({"use": "inference"}, {"error": 1.1e-6}, "_approaches"), {10: False}),
    ],
    "layer_norm": [
        (PAIR(error=2e-3), {1: False}),
        (of_ours("_pair", dtype="float64")(error=1e-9), {1: False}),
        (PAIR(dx=1e-12), {2: False}),
        (GRADIENTS(dweight=2e-7), {3: False}),
        (GRADIENTS(dbias=3e-7), {4: False}),
        (GRADIENTS(dx="inf"), {5: False}),
        (GRADIENTS(dweight=0.5), {3: False, 6: False}),
        (of_ours("_by_batch_norm")(difference=2e-6), {7: False}),
    ],
    "stability": [
        (trained("ema", "0.99")(loss=1.04), {1: False}),
        (trained("ema", "0.99")(largest_gradient_norm=1.9), {1: False, 3: False}),
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
        (CONTRAST(accuracy_after=""), {1: True, 4: True}),
        (CONTRAST(gradient=9.9, accuracy_after=0.51), {}),
        # Of five seeds two are a minority.
        (clipping("ema", "False", "contrast by 1e3", seed=("0", "1"))(**A2), {}),
        (
            clipping("ema", "False", "contrast by 1e3", seed=("0", "1", "2"))(**A2),
            {1: True, 4: True},
        ),
        (
            clipping("batch", "False", ("one image by 1e3", "constant 1e3"))(**FINE),
            {2: False, 5: None, 7: False, 9: False},
        ),
        # Growth of the running variance: at most 1 + 7 * 0.01 / (1 - 0.99^100) = 1.1104.
        (GROWTH(growth=1.112), {6: False}),
        (GROWTH(growth=""), {6: False}),
        (clipping("ema", "False", "scaled by 1e3")(**FINE), {6: False}),
        (clipping("batch", "False", "one image by 1e3")(**FINE), {7: False}),
        (clipping("batch", "True", "one image by 1e3")(test_end=0.79), {7: False}),
        (clipping("batch", "True", "scaled by 1e3")(**FINE), {8: False}),
        (
            clipping("batch", "False", "scaled by 1e3")(**A1),
            {1: True, 3: False, 8: False},
        ),
        (CLIPPED_LOUD(**FINE), {5: True, 9: False}),
        (CLIPPED_LOUD(test_end=0.81), {5: True, 9: False}),
        (CLIPPED_LOUD(accuracy_end=0.87), {9: False}),  # nor does training look fine
        (clipping("smooth_start", "True", "none")(test_end=0.88), {10: False}),
    ],
    "determinism": [
        (ran("no seed")(**SAME_BITS), {1: False}),
        (ran("a seed", run="run 2")(fingerprint="aa"), {2: False}),
        (ON_ONE_CORE(fingerprint="aa"), {3: False}),
        (ON_ONE_CORE(final_loss=0.5), {3: False}),
        (ON_ONE_CORE(by_step="0x1"), {3: False}),
        (ran("the recipe, 2 devices", run="run 2")(fingerprint="aa"), {4: False}),
        (
            ran("the recipe, other devices", run=("1 device", "8 devices"))(**SAME_BITS),
            {5: False},
        ),
        (
            ran("device_invariant, other devices", run="8 devices")(
                by_probe="x".join("1" * 35)
            ),
            {6: False},
        ),
        (
            ran("device_invariant, other devices")(by_probe="1x" + "0x" * 34),
            {},
        ),  # of the images
        (FAULT(parts=""), {7: False}),
        (FAULT(parts="step 37: `norm` forward"), {7: False}),
        (FAULT(run="before step 36"), {7: False}),
        (
            Edit({"network": "small", "transport": "outputs"}, {"median": 1.06}, "_overhead"),
            {8: False},
        ),
        (Edit({"network": "large"}, {"median": 2}, "_overhead"), {}),
    ],
    "compiled": [
        (moved("eqx-norm, xla", direction="forward + backward")(units=9.2), {1: False}),
        (moved("Equinox batch")(units=20), {}),
        (moved("eqx-norm, xla", BETWEEN)(layout_changes=9), {2: False}),
        (moved(TRITON, direction="forward")(units=3.1), {3: False}),
        (moved(MOSAIC, direction="forward, then backward")(units=8.2), {3: False}),
        (moved(TRITON, BETWEEN)(layout_changes=9), {4: False}),
        (moved(MOSAIC, BETWEEN)(layout_changes=9), {4: False}),
        (Edit({"program": BETWEEN}, {"layout_changes": 9}, "_programs"), {}),
        (Edit({"implementation": TRITON}, {"problem": "spills"}, "_kernels"), {5: False}),
        (Edit({"implementation": MOSAIC}, {"problem": "atomics"}, "_kernels"), {6: False}),
        (Edit({"implementation": TRITON}, {"problem": "narrow loads"}, "_kernels"), {7: False}),
        (
            Edit({"implementation": MOSAIC}, {"problem": "no copies ahead"}, "_kernels"),
            {8: False},
        ),
        (Edit({"implementation": MOSAIC}, {"problem": "unfenced"}, "_kernels"), {9: False}),
        (Edit({}, {"recipe": "adds atomically"}, "_recipe"), {10: False}),
        (Edit({"program": "BatchNorm, ReLU"}, {"same": "False"}, "_recipe"), {11: False}),
        (Edit({"program": "x.at[i].add(v)"}, {"same": "True"}, "_recipe"), {}),
    ],
    "speed": [
        (Edit({"part": "agreement", "peer": "PyTorch"}, {"note": "differs"}), {1: False}),
        (timed("Equinox ema")(20), {2: False}),  # the faster of the two
        (timed("eqx-norm", dtype="f32")(12), dict.fromkeys((3, 4, 7), False)),
        (timed("eqx-norm", dtype="f32")(15), dict.fromkeys((2, 3, 4, 5, 7), False)),
        (timed("eqx-norm", dtype="f32")(16), dict.fromkeys((2, 3, 4, 5, 6, 7), False)),
        (compiled("compile")(temporaries=0.11), {8: False}),
        (timed("eqx-norm", dtype="bf16")(16), {9: False}),
        (compiled("compile")(compile_seconds=0.21), {10: False}),
        (compiled("stack")(compile_seconds=5.1), {11: False}),
        (timed("eqx-norm", "growth")(lambda row: number(row) ** 1.2), {12: False}),
        (timed("eqx-norm", "growth")(lambda row: number(row) ** 0.8), {12: False}),
        # The powers of 3 are beside it.
        (timed("eqx-norm", "growth")(lambda row: number(row) ** (1 + number(row) % 2)), {}),
        (timed("eqx-norm, device-invariant")(20.1), {13: False}),
        (timed("eqx-norm", "layer_norm")(2.1), {14: False}),
        (Edit({"peer": "Flax nnx"}, {"note": "failed: x"}), {15: False}),
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


@pytest.mark.parametrize(
    ("claims", "nothing"),
    [
        (accuracy.CLAIMS, []),
        (stability.CLAIMS, {}),
        (state_consistency.CLAIMS, []),
        ((*variance_clipping.THREAD, *variance_clipping.FOUND), {}),
    ],
)
def test_without_rows_no_claim_is_judged(claims, nothing):
    assert {claim.verdict(nothing).holds for claim in claims} == {None}
