"""The benchmark measures what it says, and says so when a target is missed."""

import csv
import dataclasses
import json
import math
import re

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import (
    benchmark,
    benchmark_agreement,
    benchmark_compiled,
    benchmark_figures,
    benchmark_layers,
    benchmark_runs,
    benchmark_targets,
    benchmark_timing,
    benchmark_torch,
)
from experiments.benchmark_layers import EQUINOX, FLAX, OURS
from experiments.benchmark_parts import COPY, PARTS
from experiments.benchmark_runs import Row

BOTH = "forward + backward"
LARGE, SMALL = (64, 64, 32, 32), (64, 512)


def test_quick_holds_what_does_not_depend_on_the_machine(tmp_path, capsys):
    assert benchmark.main(["--quick", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"\| 1\. f32.*\| holds", printed)
    assert re.search(r"\| 8\. f32.*\| holds", printed)
    with (tmp_path / "results" / "benchmark.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["contestant"] for row in rows} == {OURS, *EQUINOX, PARTS, COPY}
    written = json.loads((tmp_path / "results" / "benchmark.json").read_text())
    assert written["rounds"] == benchmark.QUICK.rounds
    assert {"device", "cores", "python", "jax", "equinox"} <= set(written["environment"])
    assert len(written["targets"]) == len(benchmark_targets.TARGETS)
    assert (tmp_path / "figures" / "benchmark.png").stat().st_size > 10_000


@pytest.mark.parametrize("shape", [(6, 5, 4, 3), (16, 5)], ids=str)
@pytest.mark.parametrize("dtype", benchmark_layers.DTYPES)
def test_contestants_agree(shape, dtype):
    assert_agreement((OURS, *EQUINOX), shape, dtype)


@pytest.mark.peers
@pytest.mark.filterwarnings("default")  # the peers' own, of what they import
@pytest.mark.parametrize("shape", [(6, 5, 4, 3), (16, 5)], ids=str)
@pytest.mark.parametrize("dtype", benchmark_layers.DTYPES)
def test_peers_agree(shape, dtype):
    agreement = assert_agreement(FLAX, shape, dtype)
    given = benchmark_layers.numbers(shape)
    result = benchmark_torch.programs(given, dtype)[BOTH].call()
    deviation = agreement.deviation(benchmark_torch.outputs(result))
    assert deviation <= agreement.tolerance


def assert_agreement(names, shape, dtype):
    given = benchmark_layers.numbers(shape)
    agreement = benchmark_agreement.Agreement(given, dtype)
    for name in names:
        if dtype in benchmark_layers.JAX_LAYERS[name].dtypes:
            case = benchmark_layers.case(name, given, dtype)
            outputs = case.outputs(case.program(BOTH).call())
            assert agreement.deviation(outputs) <= agreement.tolerance, name
            # What is timed as forward is the same y.
            y = case.program("forward").call()[0]
            y = np.moveaxis(y, -1, 1) if case.channels_last else y
            np.testing.assert_allclose(
                np.asarray(y, np.float32), outputs.y, atol=agreement.tolerance
            )
    return agreement


def test_disagreement_is_seen():
    given = benchmark_layers.numbers((6, 5, 4, 3))
    agreement = benchmark_agreement.Agreement(given, "f32")
    case = benchmark_layers.case(OURS, given, "f32")
    right = case.outputs(case.program(BOTH).call())
    for field in right._fields:
        for wrong in (1.01, math.nan):
            outputs = right._replace(**{field: wrong * getattr(right, field)})
            assert agreement.deviation(outputs) > agreement.tolerance, field


def test_a_stack_is_one_layer_after_the_other():
    given = benchmark_layers.numbers((6, 5, 4, 3))
    x = given.x
    for _ in range(3):
        mixed = benchmark_layers.mixed(jnp.asarray(x), jnp.asarray(given.weight), 1)
        one = benchmark_layers.case(OURS, given._replace(x=np.asarray(mixed)), "f32")
        x = np.asarray(one.program("forward").call()[0])
    stack = benchmark_layers.case(OURS, given, "f32", depth=3).program("forward").call()
    np.testing.assert_allclose(stack[0], x, rtol=1e-5, atol=1e-5)


def test_timings_are_interleaved_and_per_call():
    calls: list[str] = []

    def program(name: str) -> benchmark_layers.Program:
        return benchmark_layers.Program(lambda: calls.append(name), lambda result: result)

    # A call of a list method takes far less than LEAST: many of them are one timing.
    programs = {name: program(name) for name in "ab"}
    times = benchmark_timing.interleave(programs, 4, seed=1)
    assert [len(t.seconds) for t in times.values()] == [4, 4]
    assert all(0 < s < benchmark_timing.LEAST for t in times.values() for s in t.seconds)
    rounds = 4 + benchmark_timing.WARM_UPS
    for name in "ab":
        assert calls.count(name) >= rounds * (1 + times[name].calls)


def test_temporaries_are_those_of_the_program():
    x = jnp.zeros((512, 512))
    # One product is needed whole before the next.
    needs = benchmark_compiled.compiled(lambda x: (x @ x) @ x, (x,))
    none = benchmark_compiled.compiled(lambda x: -x, (x,))
    assert needs.temporaries >= x.nbytes
    assert none.temporaries < 0.1 * x.nbytes
    assert needs.seconds > 0


def fabricated(**slower: float) -> list[Row]:
    """Runs that reach every target; `slower` multiplies what a keyword names."""
    rows = []
    for shape in (LARGE, SMALL):
        for dtype in ("f32", "bf16"):
            time = {OURS: 10.0, "torch": 15.0, PARTS: 9.5, COPY: 2.0}
            time |= dict.fromkeys(EQUINOX, 40.0) | dict.fromkeys(FLAX, 14.0)
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
    for n in (2**i for i in range(13)):
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


def test_a_missed_target_is_printed_as_such(tmp_path, capsys, monkeypatch):
    rows = changed(OURS, temporaries=2.0)
    monkeypatch.setattr(benchmark, "run", lambda job: rows)
    assert benchmark.main(["--quick", "--out", str(tmp_path)]) == 1
    assert benchmark.main(["--only", "time", "--out", str(tmp_path)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line[:4] == "| 8."]
    assert len(lines) == 2
    assert all("2.000 of x's bytes" in line and "DOES NOT HOLD" in line for line in lines)


def test_the_file_holds_all_of_it(tmp_path):
    """The tables and the figure are made from it alone."""
    rows = fabricated()
    benchmark_runs.save(tmp_path / "results" / "benchmark.csv", rows)
    loaded = benchmark_runs.load(tmp_path / "results" / "benchmark.csv")
    assert benchmark.report(loaded) == benchmark.report(rows)
    assert benchmark.report(rows).count("| holds") == len(benchmark_targets.TARGETS)
    drawn = []
    for _ in range(2):
        (path,) = benchmark_figures.draw(tmp_path, "benchmark")
        drawn.append(path.read_bytes())
    assert drawn[0] == drawn[1]
    assert benchmark_runs.merge(rows, rows) == rows


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "64"], "--shapes: '64': must be N,C,.*for example 64,64,32,32"),
        (["--shapes", "8,0"], "--shapes: '8,0': must be N,C"),
        (["--shapes", "big"], "--shapes: 'big': must be N,C"),
        (["--rounds", "0"], "--rounds: 0: must be 1 or more"),
        (["--dtype", "f64"], "--dtype: invalid choice: 'f64'"),
        (["--contestants", "keras"], "--contestants: invalid choice: 'keras'.*flax linen"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_arguments_end_with_a_sentence(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        benchmark.main(["--quick", *arguments])
    assert exit_.value.code == 2
    assert re.search(message, capsys.readouterr().err.replace("\n", " "))


def test_an_output_folder_that_cannot_be_made_is_known_before_the_measuring(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as exit_:
        benchmark.main(["--out", str(tmp_path / "file")])
    assert exit_.value.code == 2
    assert "file/results cannot be made (Not a directory)" in capsys.readouterr().err


def test_what_is_not_installed_is_left_out(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(benchmark, "run", lambda job: fabricated())
    assert benchmark.main(["--only", "time", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "flax linen, flax nnx, torch: not installed here" in said
    assert benchmark_layers.available((OURS, "torch")) == ([OURS], ["torch"])


def test_only_the_whole_job_with_all_contestants_replaces_the_committed_results():
    def out(arguments: list[str]) -> str:
        job = benchmark._job(benchmark._parser().parse_args(arguments))
        return str(benchmark._default_out(job))

    assert out([]).endswith("experiments")
    assert out(["--rounds", "50"]).endswith("experiments")
    for arguments in (["--quick"], ["--rounds", "5"], ["--contestants", OURS]):
        assert out(arguments) == "build/benchmark"
