"""The experiment on speed measures what was asked for, on the device that was asked for."""

import dataclasses
import importlib.util
import json

import pytest

from experiments.lab import rows
from experiments.lab.errors import UserError
from experiments.lab.experiment import Files
from experiments.lab.peers import names
from experiments.speed import __main__ as speed
from experiments.speed import cases, measure, parts
from experiments.speed.roofline import MEMORY_COPY, PARTS
from experiments.speed.rows import FAILED, NOT_SERVED, Row, because, replaced

EXPERIMENT = speed.EXPERIMENT


def test_quick_holds_what_does_not_depend_on_the_machine(tmp_path):
    arguments = ["--quick", "--shapes", "16,64,32,32", "--out", str(tmp_path)]
    assert EXPERIMENT.main(arguments) == 0
    measured = rows.load(tmp_path / "results" / "speed.csv", Row)
    assert {row.part for row in measured} == set(cases.QUICK.parts)
    timed = [row for row in measured if row.part == "time"]
    assert {row.peer for row in timed} == {names.OURS, *cases.EQUINOX, PARTS, MEMORY_COPY}
    assert all(0 < row.low <= row.median <= row.high for row in timed)
    written = json.loads((tmp_path / "results" / "speed.json").read_text())
    assert written["settings"]["rounds"] == cases.QUICK.rounds


def test_a_rehearsal_measures_every_part_and_can_be_added_to(tmp_path):
    # One test: it takes some 20 seconds, and its parts may be run by several processes.
    arguments = ["--device", "rehearsal", "--out", str(tmp_path), "--peers", names.OURS]
    arguments += [names.OURS_XLA, names.EQUINOX_BATCH, names.EQUINOX]
    # Every claim holds but those on speed.
    assert EXPERIMENT.main(arguments) == 0
    files = Files(tmp_path, "speed_rehearsal")
    measured = rows.load(files.csv(), Row)
    assert {row.part for row in measured} == {"copy", *cases.REHEARSAL.parts}
    timed = [row for row in measured if row.part in ("time", "layer_norm")]
    every = {("time", cases.FIRST), ("time", cases.LAST), ("layer_norm", cases.ROWS)}
    for peer in (names.OURS, names.OURS_XLA):
        assert {(row.part, row.layout) for row in timed if row.peer == peer} == every
    assert not [row.note for row in timed if row.note]
    assert all(row.share > 0 and row.host > 0 and row.instances == 2 for row in timed)
    assert cases.NO_NORM in {row.peer for row in measured if row.part == "training"}
    assert files.figure().stat().st_size > 10_000

    assert EXPERIMENT.main([*arguments, "--only", "bits"]) == 0
    after = rows.load(files.csv(), Row)
    kept = [repr(row) for row in measured if row.part != "bits"]  # a NaN is not itself
    assert [repr(row) for row in after if row.part != "bits"] == kept
    assert len(after) == len(measured)
    seconds = json.loads(files.json.read_text())["seconds of parts"]
    assert set(seconds) == set(cases.REHEARSAL.parts)


@pytest.mark.peers
@pytest.mark.filterwarnings("default")  # the peers' own, of what they import
def test_the_peers_take_part(tmp_path):
    arguments = ["--device", "rehearsal", "--only", "agreement", "time"]
    assert EXPERIMENT.main([*arguments, "--out", str(tmp_path)]) == 0
    measured = rows.load(tmp_path / "results" / "speed_rehearsal.csv", Row)
    for part in ("agreement", "time"):
        assert {names.LINEN, names.TORCH} <= {r.peer for r in measured if r.part == part}


# What is asked for.


def chosen(*arguments):
    options = EXPERIMENT.parser().parse_args(arguments)
    return speed.choose(cases.QUICK if options.quick else cases.Job(), options)


def has(monkeypatch, **device):
    found = type("Device", (), device)
    monkeypatch.setattr("jax.devices", lambda: [found])


def test_what_is_asked_for(monkeypatch):
    assert chosen() == cases.Job()
    assert chosen("--quick") == cases.QUICK
    assert chosen("--device", "rehearsal", "--quick") == cases.REHEARSAL
    assert chosen("--contestants", names.TORCH, "--dtype", "f32") == dataclasses.replace(
        cases.Job(), peers=(names.TORCH,), dtypes=("f32",)
    )
    has(monkeypatch, platform="gpu", device_kind="NVIDIA H200")
    assert chosen("--device", "gpu") == cases.GPU
    assert chosen("--device", "gpu", "--quick") == cases.GPU_QUICK
    assert [speed.stem(job) for job in (cases.Job(), cases.REHEARSAL, cases.GPU)] == [
        "speed",
        "speed_rehearsal",
        "speed_nvidia-h200",
    ]
    kept = dataclasses.replace(cases.Job(), memory="kept")
    assert speed.stem(kept) == "speed_kept-memory"


def test_the_whole_job_is_one_of_either_device_with_every_peer(monkeypatch):
    monkeypatch.setattr(speed, "present", lambda job: (job, {}))
    assert speed.is_whole(cases.Job())
    assert speed.is_whole(dataclasses.replace(cases.Job(), memory="kept", rounds=30))
    assert speed.is_whole(cases.GPU)
    less = [{"rounds": 5}, {"peers": (names.OURS,)}, {"parts": ("time",)}, {"dtypes": ("f32",)}]
    for whole, _ in cases.JOBS.values():
        assert not any(speed.is_whole(dataclasses.replace(whole, **part)) for part in less)
    assert not speed.is_whole(cases.REHEARSAL)


def test_without_a_gpu_it_says_what_to_do(monkeypatch):
    has(monkeypatch, platform="cpu")
    with pytest.raises(UserError, match=r"finds none here \(cpu\).*--device rehearsal"):
        chosen("--device", "gpu")


def test_nobody_is_not_a_race(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    nobody, left_out = speed.present(dataclasses.replace(cases.Job(), peers=cases.IN_TORCH))
    assert left_out.keys() == set(cases.IN_TORCH)
    with pytest.raises(UserError, match="none of them can run here"):
        measure.measure(nobody, Files(tmp_path, "speed"))


# Rows.


def test_results_of_another_environment_or_job_are_not_added_to(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        parts.Parts, "bits", lambda self: iter([[Row("rehearsal", "bits", differing=0.0)]])
    )
    (tmp_path / "results").mkdir()
    files = Files(tmp_path, "speed_rehearsal")

    def measured(job):
        noted = measure.measure(job, files)
        files.json.write_text(json.dumps(noted))
        return len(rows.load(files.csv(), Row))

    both = dataclasses.replace(cases.REHEARSAL, parts=("bits",))
    rows.save(files.csv(), Row, [])
    assert measured(both) == 1
    rows.save(files.csv(), Row, [Row("rehearsal", "agreement")])
    assert measured(both) == 2
    assert measured(dataclasses.replace(both, rounds=3)) == 1
    assert "measured with something else" in capsys.readouterr().out


def test_a_part_that_raises_is_a_row_and_stops_no_other(tmp_path, monkeypatch, capsys):
    def broken(self):
        raise MemoryError("out of memory")

    monkeypatch.setattr(parts.Parts, "agreement", broken)
    monkeypatch.setattr(parts.Parts, "stack", lambda self: iter([[Row("cpu", "stack")]]))
    (tmp_path / "results").mkdir()
    files = Files(tmp_path, "speed")
    measure.measure(dataclasses.replace(cases.Job(), parts=("agreement", "stack")), files)
    failed, fine = rows.load(files.csv(), Row)
    assert (failed.failed, fine.failed) == (True, False)
    assert "out of memory" in capsys.readouterr().out


def test_rows_are_replaced_by_part_and_dtype():
    def made(which, dtypes, calls):
        return [Row("gpu", part, (8,), d, calls=calls) for part in which for d in dtypes]

    crashed = Row("gpu", "time", peer="all", note=f"{FAILED}x")
    old = [*made(("bits", "time"), ("f32", "bf16"), 0), crashed]
    found = replaced(old, made(("time",), ("bf16",), 1))
    assert {(row.part, row.dtype): row.calls for row in found} == {
        ("bits", "f32"): 0,
        ("bits", "bf16"): 0,
        ("time", "f32"): 0,
        ("time", "bf16"): 1,
    }


def test_a_share_is_of_the_copy(monkeypatch):
    work = parts.Parts(dataclasses.replace(cases.GPU, peers=(names.OURS,)), None)  # pyright: ignore[reportArgumentType]
    work._bandwidth = 4e9  # bytes a millisecond
    monkeypatch.setattr(
        work, "_race", lambda made, title: [dataclasses.replace(r, median=2.0) for r in made]
    )
    problem = cases.Problem((1000, 1_000_000), "f32", cases.ROWS)
    shares = {row.share for row in work._layer("layer_norm", problem, cases.BOTH)}
    assert shares == {5 * problem.bytes / 2.0 / 4e9}


@pytest.mark.parametrize(
    ("peer", "error", "starts"),
    [
        (names.OURS_TRITON, ValueError("implementation='pallas_triton' cannot"), NOT_SERVED),
        (names.OURS, ValueError("implementation='auto' cannot serve x"), FAILED),
        (names.OURS_TRITON, RuntimeError("implementation=: illegal address"), FAILED),
        (names.EQUINOX, MemoryError("out of memory\nand more"), FAILED),
    ],
    ids=["refused", "auto", "crashed", "peer"],
)
def test_only_what_is_asked_for_by_name_may_refuse(peer, error, starts):
    row = because(Row("gpu", "time", (8,), "f32", cases.LAST, peer, cases.BOTH), error)
    assert row.note.startswith(starts)
    assert "\n" not in row.note
    assert row.failed == (starts == FAILED)
