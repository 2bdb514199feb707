"""Each target of the benchmark holds where its numbers reach it, and only there."""

import dataclasses
import math

from experiments import benchmark_targets
from experiments.benchmark_layers import BOTH, EQUINOX, FLAX, INVARIANT, OURS
from experiments.benchmark_parts import COPY, PARTS
from experiments.benchmark_runs import Row

LARGE, SMALL = (64, 64, 32, 32), (64, 512)


def fabricated(**slower: float) -> list[Row]:
    """Runs that reach every target; `slower` multiplies what a keyword names."""
    rows = []
    for shape in (LARGE, SMALL):
        for dtype in ("f32", "bf16"):
            time = {OURS: 10.0, "torch": 15.0, PARTS: 9.5, COPY: 2.0}
            time |= dict.fromkeys(EQUINOX, 40.0) | dict.fromkeys(FLAX, 14.0)
            time[INVARIANT] = 20.0 * slower.get("invariant", 1.0) * slower.get(dtype, 1.0)
            time[OURS] *= slower.get(dtype, 1.0)
            for name, ms in time.items():
                times = {"median": ms, "low": 0.9 * ms, "high": 1.2 * ms, "calls": 1}
                row = Row("layer", shape, dtype, name, BOTH, **times)
                if name == COPY:
                    row = dataclasses.replace(row, program="forward")
                elif name != PARTS:
                    counts = {"temporaries": 0.0, "compile_seconds": 0.2, "deviation": 1e-6}
                    row = dataclasses.replace(row, **counts)
                rows.append(row)
    for name, seconds in {OURS: 4.0 * slower.get("stack", 1.0), "equinox batch": 5.0}.items():
        rows.append(Row("stack", (32, 32, 8, 8), "f32", name, BOTH, compile_seconds=seconds))
    for n in (*(2**i for i in range(13)), *(3**i for i in range(1, 8))):
        ms = float(n) ** slower.get("exponent", 1.0)
        shape = (n, 64, 16, 16)
        rows.append(Row("growth", shape, "f32", OURS, BOTH, ms, ms, ms, 1))
    return rows


def missed(rows: list[Row]) -> list[int]:
    """The numbers of the targets that do not hold."""
    return [i for i, v in enumerate(benchmark_targets.judge(rows), start=1) if not v.holds]


def changed(name: str, **values: float) -> list[Row]:
    return [
        dataclasses.replace(row, **values)
        if row.contestant == name and row.part == "layer" and not math.isnan(row.temporaries)
        else row
        for row in fabricated()
    ]


def test_each_verdict_follows_its_numbers():
    assert missed(fabricated()) == []
    assert missed(fabricated(f32=1.2)) == [3, 4, 7]
    assert missed(fabricated(f32=1.5)) == [2, 3, 4, 5, 7]
    assert missed(fabricated(f32=1.6)) == [2, 3, 4, 5, 6, 7]
    assert missed(fabricated(bf16=1.6)) == [9]
    assert missed(fabricated(stack=1.3)) == [11]
    assert missed(fabricated(exponent=1.2)) == [12]
    assert missed(fabricated(exponent=0.8)) == [12]
    assert missed(fabricated(invariant=1.1)) == [13]
    assert missed(changed(OURS, temporaries=0.11)) == [8]
    assert missed(changed(OURS, compile_seconds=0.21)) == [10]
    assert missed(changed("torch", deviation=1e-3)) == [1]
    assert missed(changed("torch", deviation=math.inf)) == [1]
    assert {v.holds for v in benchmark_targets.judge([])} == {None}


def test_the_faster_of_two_is_what_counts():
    rows = changed("equinox ema", median=20.0)
    assert missed(rows) == [2]
    second = benchmark_targets.judge(rows)[1]
    assert second.measured == "2.00 x (2.00 x equinox ema, 4.00 x equinox batch)"


def test_growth_is_judged_by_the_powers_of_two():
    steep = fabricated(exponent=2.0)
    for odd, measured, targets in (
        (False, "exponent 2.000; 1.000 for powers of 3", [12]),
        (True, "exponent 1.000; 2.000 for powers of 3", []),
    ):
        rows = [
            bad if good.part == "growth" and good.shape[0] % 2 == odd else good
            for good, bad in zip(fabricated(), steep, strict=True)
        ]
        assert benchmark_targets.judge(rows)[11].measured == measured
        assert missed(rows) == targets
