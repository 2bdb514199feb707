"""Each claim on speed holds where its numbers reach it, and only there."""

import dataclasses
from typing import Any

import pytest

from experiments.lab import rows
from experiments.lab.experiment import Files
from experiments.lab.peers import names
from experiments.speed import claims
from experiments.speed.__main__ import EXPERIMENT
from experiments.speed.cases import (
    BOTH,
    COLD,
    FIRST,
    FORWARD,
    HOT,
    INFERENCE,
    LARGE,
    LAST,
    OWN,
    ROWS,
)
from experiments.speed.rows import Row
from tests.experiments.editing import Edit, edit, flipped, verdicts

# On a GPU.

SHAPE, OTHER = (8, LARGE // 8), (9, LARGE // 8)
OURS, PALLAS = names.OURS, names.OURS_PALLAS
TIMES = {OURS: 1.0, PALLAS: 1.2, names.EQUINOX_BATCH: 2.0}
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
    (of("bits", PALLAS)(differing=1), [1]),
    (of("agreement", PALLAS)(deviation=0.5, note="differs"), [2]),
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
    # Within what two timings of one program differ by, or within the quartiles.
    (of("layer_norm", names.TORCH)(**spread(0.98)), []),
    (of("layer_norm", names.TORCH)(median=0.9, low=0.8, high=1.1), []),
    (of("time", names.TORCH)(note="failed: x"), [10]),
]


@pytest.mark.parametrize(("change", "numbers"), CASES)
def test_each_verdict_follows_its_rows(change, numbers, files):
    assert flipped(EXPERIMENT, files, [change]) == dict.fromkeys(numbers, False)


def test_in_a_rehearsal_speed_is_not_judged(files):
    edit(files, [slow("time", names.TORCH), Edit({}, {"device": "rehearsal"})])
    found = EXPERIMENT.report(files).verdicts
    silent = [i for i, v in enumerate(found, 1) if v.measured == "says nothing on a CPU"]
    assert silent == [i for i, v in enumerate(found, 1) if not v.quick] == list(range(3, 10))
    assert not [v for v in found if v.holds is False]


@pytest.mark.parametrize(
    ("device", "quick"), [("cpu", [1, 16, 17, 20]), ("gpu", [10]), ("rehearsal", [10])]
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


# On a CPU.

SMALL, LARGER = (256, 256), (1024, 1024)  # below 1 MiB in f32, and in bf16 above it, too
BELOW, ABOVE = "256x256", "1024x1024"
SEPARATE, EMA, BATCH = names.OURS_SEPARATE, names.EQUINOX_EMA, names.EQUINOX_BATCH
ON_A_CPU = {OURS: 10, SEPARATE: 10, EMA: 25.2, BATCH: 26}
ON_A_CPU |= {names.LINEN: 13.1, names.NNX: 13.5, names.TORCH: 12.1}
BUILT = {SEPARATE: (28.0, 0.2), BATCH: (50.0, 0.2)}


def on_a_cpu(
    part, shape, peer, program=BOTH, cache="", dtype="f32", layout=OWN, **measured: Any
):
    return Row("cpu", part, shape, dtype, layout, peer, program, cache, **measured)


@pytest.fixture
def results(tmp_path):
    """Returns results of which every claim holds; just so, where it is of a CPU's speed."""
    found = []
    for shape in (SMALL, LARGER):
        for peer, ms in ON_A_CPU.items():
            found.append(on_a_cpu("agreement", shape, peer, deviation=1e-6))
            for cache in (HOT, COLD):
                for program, dtype in ((BOTH, "f32"), (BOTH, "bf16"), (INFERENCE, "f32")):
                    how = peer, program, cache, dtype
                    found.append(on_a_cpu("time", shape, *how, **spread(ms)))
        for peer, ms in ((OURS, 3), (names.EQUINOX, 3), (names.TORCH, 2)):
            for program in (FORWARD, BOTH):
                how = peer, program, COLD, "f32", ROWS
                found.append(on_a_cpu("layer_norm", shape, *how, **spread(ms)))
        for peer in (OURS, EMA, BATCH):
            needed: Any = {"temporaries": 0.1, "compile_seconds": 0.2}
            found.append(on_a_cpu("compile", shape, peer, **needed))
    for peer, (units, seconds) in BUILT.items():
        for blocks in (4, 8):
            program = f"{blocks} blocks"
            found.append(on_a_cpu("residual", SMALL, peer, program, units=units))
        stages: Any = {"trace_seconds": 0.05, "lower_seconds": 0.05, "compile_seconds": seconds}
        found.append(on_a_cpu("networks", SMALL, peer, "ResNet-18", **stages))
    for n in (2**13, 2**14):
        found.append(on_a_cpu("growth", (n, 64), OURS, median=float(n)))
    files = Files(tmp_path, "speed")
    rows.save(files.csv(), Row, found)
    return files


def time(peer, ms, program=BOTH, **where):
    return of("time", peer, program=program, **where)(**spread(ms))


IN_F32 = {"dtype": "f32", "cache": COLD}
ON_A_CPU_CASES = [
    ([of("agreement", names.TORCH)(note="differs")], [1]),
    # The faster of two, and on the mean over the arrays.
    ([time(EMA, 24, **IN_F32)], [2, 5]),
    ([time(EMA, 24.5, shape=BELOW, **IN_F32), time(EMA, 27, shape=ABOVE, **IN_F32)], []),
    ([time(names.NNX, 12.9, **IN_F32)], [3, 6]),
    ([time(names.TORCH, 11.9, **IN_F32)], [4, 7]),
    # Hot is not judged.
    ([time(EMA, 5, cache=HOT), time(names.TORCH, 5, cache=HOT)], []),
    ([time(SEPARATE, 10.1, **IN_F32)], [2, 3, 4]),
    ([time(OURS, 10.1, **IN_F32)], [5, 6, 7]),
    ([time(SEPARATE, 28, shape=BELOW, **IN_F32), time(names.TORCH, 50, **IN_F32)], [2, 3, 8]),
    ([time(names.TORCH, 9, shape=ABOVE, **IN_F32)], [4, 7, 9]),
    ([time(names.TORCH, 9, shape=BELOW, **IN_F32)], [4, 7]),
    ([time(names.TORCH, 7.6, shape=BELOW, **IN_F32)], [4, 7, 10]),
    ([time(names.TORCH, 9.9, dtype="bf16", shape=ABOVE)], [11]),
    ([time(names.TORCH, 9.9, dtype="bf16", shape=BELOW)], []),
    ([time(BATCH, 9, INFERENCE, cache=HOT)], [12]),
    ([of("layer_norm", names.EQUINOX, program=FORWARD)(**spread(2.8))], [13]),
    ([of("layer_norm", names.EQUINOX, program=BOTH)(**spread(2.8))], []),
    ([of("layer_norm", names.TORCH, shape=ABOVE)(**spread(1.9))], [14]),
    ([of("growth", OURS, shape="16384x64")(median=2**14.2)], [15]),
    ([of("compile", OURS, shape=BELOW)(temporaries=0.11)], [16]),
    ([of("residual", SEPARATE, program="8 blocks")(units=28.3)], [17]),
    ([of("residual", BATCH)(units=27)], [17]),
    ([of("compile", OURS)(compile_seconds=0.21)], [18]),
    ([of("networks", SEPARATE)(compile_seconds=0.23)], [19]),
    ([of("time", names.NNX)(note="failed: x")], [20]),
]


@pytest.mark.parametrize(("changes", "numbers"), ON_A_CPU_CASES)
def test_each_verdict_on_a_cpu_follows_its_rows(changes, numbers, results):
    assert flipped(EXPERIMENT, results, changes) == dict.fromkeys(numbers, False)


def test_no_claim_on_a_cpu_is_without_a_case(results):
    found = verdicts(EXPERIMENT, results)
    assert found == dict.fromkeys(found, True)
    assert {number for _, numbers in ON_A_CPU_CASES for number in numbers} == found.keys()


def test_the_tables_on_a_cpu_say_what_was_measured(results):
    said = EXPERIMENT.report(results)
    assert "its time: Equinox 2.52 x, Flax 1.31 x, PyTorch 1.21 x" in said.peers
    assert "ResNet-18 1.00 (trace 1.00, lower 1.00, compile 1.00)" in said.text
    assert "28.0 (Equinox: 50.0) in 4 blocks" in said.text
