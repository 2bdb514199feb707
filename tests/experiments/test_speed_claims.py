"""Each claim on speed holds where its numbers reach it, and only there."""

import dataclasses
import math
from typing import Any

import pytest

from experiments.lab import figures, rows
from experiments.lab.experiment import Files
from experiments.lab.peers import names
from experiments.speed import claims, tables
from experiments.speed.cases import (
    BOTH,
    EQUINOX,
    FIRST,
    FLAX,
    LARGE,
    LAST,
    NO_NORM,
    OWN,
    PASSES,
    ROWS,
    STEP,
)
from experiments.speed.claims import ON_A_CPU, ON_A_GPU
from experiments.speed.figures import draw
from experiments.speed.roofline import MEMORY_COPY, PARTS
from experiments.speed.rows import DIFFERS, FAILED, Row


def spread(median) -> Any:
    return {"median": median, "low": 0.99 * median, "high": 1.01 * median, "calls": 1}


def changed(measured, part, peer, **fields):
    """Returns the rows, with those of one peer in one part changed."""
    return [
        dataclasses.replace(row, **fields) if (row.part, row.peer) == (part, peer) else row
        for row in measured
    ]


def missed(measured):
    """Returns the numbers of the claims that do not hold."""
    return [i for i, v in enumerate(claims.verdicts(measured), 1) if v.holds is False]


# On a CPU.


def on_a_cpu(**slower):
    """Returns rows that reach every target; `slower` multiplies what a keyword names."""
    found = []

    def add(part, shape, dtype, peer, layout=OWN, program=BOTH, **fields):
        found.append(Row("cpu", part, shape, dtype, layout, peer, program, **fields))

    for shape in ((64, 64, 32, 32), (64, 512)):
        for dtype in ("f32", "bf16"):
            ours = 10.0 * slower.get(dtype, 1.0)
            times = {names.OURS: ours, names.TORCH: 15.0, PARTS: 9.5, MEMORY_COPY: 2.0}
            times |= dict.fromkeys(EQUINOX, 40.0) | dict.fromkeys(FLAX, 14.0)
            times[names.OURS_INVARIANT] = 2 * ours * slower.get("invariant", 1.0)
            for peer, ms in times.items():
                add("time", shape, dtype, peer, **spread(ms))
                if peer not in (PARTS, MEMORY_COPY):
                    add("agreement", shape, dtype, peer, deviation=1e-6)
                    counted: Any = {"temporaries": 0.0, "compile_seconds": 0.2}
                    add("compile", shape, dtype, peer, **counted)
    stacks = {names.OURS: 4.0 * slower.get("stack", 1.0), names.EQUINOX_BATCH: 5.0}
    for peer, seconds in stacks.items():
        add("stack", (32, 32, 8, 8), "f32", peer, compile_seconds=seconds)
    for n in (*(2**i for i in range(13)), *(3**i for i in range(1, 8))):
        ms = float(n) ** slower.get("exponent", 1.0)
        add("growth", (n, 64, 16, 16), "f32", names.OURS, **spread(ms))
    for peer, ms in {names.OURS: slower.get("rows", 1.0), names.EQUINOX: 2.0}.items():
        add("layer_norm", (64, 512), "f32", peer, layout=ROWS, **spread(ms))
    return found


def cpu_changed(part, peer, **fields):
    return changed(on_a_cpu(), part, peer, **fields)


@pytest.mark.parametrize(
    ("measured", "numbers"),
    [
        (on_a_cpu(), []),
        (on_a_cpu(f32=1.2), [3, 4, 7]),
        (on_a_cpu(f32=1.5), [2, 3, 4, 5, 7]),
        (on_a_cpu(f32=1.6), [2, 3, 4, 5, 6, 7]),
        (on_a_cpu(bf16=1.6), [9]),
        (on_a_cpu(stack=1.3), [11]),
        (on_a_cpu(exponent=1.2), [12]),
        (on_a_cpu(exponent=0.8), [12]),
        (on_a_cpu(invariant=1.1), [13]),
        (on_a_cpu(rows=2.1), [14]),
        (cpu_changed("compile", names.OURS, temporaries=0.11), [8]),
        (cpu_changed("compile", names.OURS, compile_seconds=0.21), [10]),
        (cpu_changed("agreement", names.TORCH, deviation=1e-3, note=DIFFERS), [1]),
        (cpu_changed("agreement", names.TORCH, deviation=math.inf, note=DIFFERS), [1]),
        (cpu_changed("agreement", names.TORCH, deviation=math.nan, note=f"{FAILED}x"), [15]),
    ],
)
def test_each_verdict_on_a_cpu_follows_its_numbers(measured, numbers):
    assert missed(measured) == numbers


def test_what_quick_fails_of_does_not_depend_on_the_machine():
    required = [i for i, v in enumerate(claims.verdicts(on_a_cpu()), 1) if v.quick]
    assert required == [1, 8, 15]


def test_the_faster_of_two_is_what_counts():
    measured = cpu_changed("time", names.EQUINOX_EMA, median=20.0)
    assert missed(measured) == [2]
    second = claims.verdicts(measured)[1]
    assert second.measured == "2.00 x (2.00 x Equinox ema, 4.00 x Equinox batch)"


@pytest.mark.parametrize(
    ("odd", "said", "numbers"),
    [
        (False, "exponent 2.000; 1.000 for powers of 3", [12]),
        (True, "exponent 1.000; 2.000 for powers of 3", []),
    ],
)
def test_growth_is_judged_by_the_powers_of_two(odd, said, numbers):
    measured = [
        bad if good.part == "growth" and good.shape[0] % 2 == odd else good
        for good, bad in zip(on_a_cpu(), on_a_cpu(exponent=2.0), strict=True)
    ]
    assert claims.verdicts(measured)[11].measured == said
    assert missed(measured) == numbers


# On a GPU.

SHAPE = (8, LARGE // 8)
TIMES = {
    names.OURS: 1.0,
    names.OURS_XLA: 1.2,
    names.EQUINOX_BATCH: 2.0,
    names.TORCH: 1.5,
    names.TORCH_COMPILED: 1.1,
}


def timing(part, peer, median, layout=LAST, program=BOTH, shape=SHAPE):
    row = Row("gpu", part, shape, "f32", layout, peer, program, share=0.9)
    return dataclasses.replace(row, **spread(median))


def on_a_gpu():
    """Returns rows of which every claim holds."""
    found = [Row("gpu", "copy", (2**20,), "f32", "", "JAX, copy", "copy", **spread(1.0))]
    for peer in (names.OURS, names.OURS_XLA):
        of = {"device": "gpu", "shape": (8, 8), "dtype": "f32", "layout": LAST, "peer": peer}
        found += [Row(part="bits", **of, program=p, differing=0.0, calls=100) for p in PASSES]
        found.append(Row(part="agreement", **of, program=BOTH, deviation=1e-6))
        found.append(timing("training", peer, TIMES[peer], "", STEP))
    found.append(timing("training", NO_NORM, 0.5, "", STEP))
    for peer, ms in TIMES.items():
        found += [timing("time", peer, ms), timing("layer_norm", peer, ms, ROWS)]
    return [
        *found,
        timing("time", names.OURS, 1.0, FIRST),
        timing("time", names.TORCH, 1.05, FIRST),
    ]


def gpu_changed(part, peer, **fields):
    return changed(on_a_gpu(), part, peer, **fields)


OURS, XLA, TORCH, COMPILED = names.OURS, names.OURS_XLA, names.TORCH, names.TORCH_COMPILED
CASES = {
    "all is well": (on_a_gpu(), []),
    "bits": (gpu_changed("bits", XLA, differing=1.0), [1]),
    "agreement": (gpu_changed("agreement", XLA, deviation=0.5, note=DIFFERS), [2]),
    "share of batch norm": (gpu_changed("time", OURS, share=0.84), [3, 4]),
    "share of layer norm": (gpu_changed("layer_norm", OURS, share=0.84), [5]),
    "share of a small array": (
        gpu_changed("time", OURS, share=0.1, shape=(8, 8)),
        [],
    ),
    "Equinox": (gpu_changed("time", names.EQUINOX_BATCH, **spread(1.4)), [6, 7]),
    # The average over Equinox's, and the least, are two claims.
    "Equinox once": (
        [
            *on_a_gpu(),
            timing("time", OURS, 1.0, shape=(9, LARGE)),
            timing("time", names.EQUINOX_BATCH, 1.3, shape=(9, LARGE)),
        ],
        [7],
    ),
    "torch compiled": (gpu_changed("time", COMPILED, **spread(0.9)), [8]),
    "torch": (gpu_changed("time", TORCH, **spread(0.9)), [8]),
    "torch, layer norm": (gpu_changed("layer_norm", TORCH, **spread(0.9)), [9]),
    "XLA": (gpu_changed("time", XLA, **spread(0.9)), [10]),
    "XLA, layer norm": (gpu_changed("layer_norm", XLA, **spread(0.9)), [10]),
    "XLA, training": (gpu_changed("training", XLA, **spread(0.9)), [10]),
    # Within what two timings of one program differ by, or within the quartiles.
    "hardly slower": (gpu_changed("training", XLA, **spread(0.98)), []),
    "within the spread": (gpu_changed("training", XLA, median=0.9, low=0.8, high=1.1), []),
    "a peer failed": (gpu_changed("time", TORCH, note=f"{FAILED}x"), [11]),
}


@pytest.mark.parametrize(("measured", "numbers"), CASES.values(), ids=CASES)
def test_each_verdict_on_a_gpu_follows_its_rows(measured, numbers):
    assert missed(measured) == numbers


def test_in_a_rehearsal_speed_is_not_judged():
    slow = [
        dataclasses.replace(row, device="rehearsal")
        for row in gpu_changed("time", XLA, **spread(0.1))
    ]
    found = claims.verdicts(slow)
    silent = [i for i, v in enumerate(found, 1) if v.measured == "says nothing on a CPU"]
    assert silent == [i for i, v in enumerate(found, 1) if not v.quick] == list(range(3, 11))
    assert missed(slow) == []


def test_nothing_measured_is_not_called_good():
    for verdicts, every in ((claims.verdicts([]), ON_A_CPU), (gpu_verdicts_of_one(), ON_A_GPU)):
        assert len(verdicts) == len(every)
        assert {verdict.holds for verdict in verdicts[:-1]} == {None}


def gpu_verdicts_of_one():
    return claims.verdicts([Row("gpu", "copy")])


def test_a_time_that_was_the_hosts_is_said_to_be():
    measured = gpu_changed("time", TORCH, **spread(0.9))
    assert "waiting for the host" not in claims.verdicts(measured)[7].measured
    measured = [dataclasses.replace(row, host=row.median) for row in measured]
    said = claims.verdicts(measured)[7].measured
    assert "slower on 2 of 2, on 2 waiting for the host" in said
    assert "1.00* 90%" in tables.report(measured).text


def test_where_auto_should_have_chosen_otherwise_is_listed():
    assert tables.wrong_choices(on_a_gpu()) == ""
    faster = [*on_a_gpu(), timing("time", names.OURS_TRITON, 0.5)]
    assert f"{LAST} f32 {BOTH}" in tables.wrong_choices(faster)
    assert names.OURS_TRITON in tables.wrong_choices(faster)


@pytest.mark.parametrize("measured", [on_a_cpu(), on_a_gpu()], ids=["CPU", "GPU"])
def test_the_file_holds_all_that_tables_verdicts_and_figure_need(measured, tmp_path):
    files = Files(tmp_path, "speed")
    rows.save(files.csv(), Row, measured)
    loaded = rows.load(files.csv(), Row)
    assert tables.report(loaded) == tables.report(measured)
    assert "DOES NOT HOLD" not in tables.report(measured).text
    with figures.style():
        (figure,) = draw(files)
    assert figure.stat().st_size > 10_000
