"""The experiment on speed measures what was asked for, on the device that was asked for."""

import dataclasses
import importlib.util
import json
from types import SimpleNamespace

import pytest

from experiments.lab import rows
from experiments.lab.errors import UserError
from experiments.lab.experiment import Files
from experiments.lab.peers import names
from experiments.speed import __main__ as speed
from experiments.speed import cases, measure
from experiments.speed.programs import ROOFLINE
from experiments.speed.rows import FAILED, NOT_SERVED, Row, because

EXPERIMENT = speed.EXPERIMENT


@pytest.mark.long
def test_quick_holds_what_does_not_depend_on_the_machine(tmp_path):
    arguments = ["--quick", "--shapes", "16,64,32,32", "--out", str(tmp_path)]
    assert EXPERIMENT.main(arguments) == 0
    measured = rows.load(tmp_path / "results" / "speed.csv", Row)
    assert {row.part for row in measured} == set(cases.QUICK.parts)
    timed = [row for row in measured if row.part == "time"]
    assert {row.peer for row in timed} == {*cases.BATCH_NORMS, *cases.EQUINOX, *ROOFLINE}
    assert {row.cache for row in timed} == {cases.HOT, cases.COLD}
    assert all(0 < row.low <= row.median <= row.high for row in timed)
    written = json.loads((tmp_path / "results" / "speed.json").read_text())
    assert written["settings"]["rounds"] == cases.QUICK.rounds


@pytest.mark.long
def test_a_rehearsal_measures_every_part(tmp_path):
    arguments = ["--device", "rehearsal", "--out", str(tmp_path), "--peers", names.OURS]
    arguments += [names.EQUINOX_BATCH, names.EQUINOX]
    # Every claim holds but those on speed.
    assert EXPERIMENT.main(arguments) == 0
    files = Files(tmp_path, "speed_rehearsal")
    measured = rows.load(files.csv(), Row)
    assert {row.part for row in measured} == {"copy", *cases.REHEARSAL.parts}
    timed = [row for row in measured if row.part in ("time", "layer_norm")]
    every = {("time", cases.FIRST), ("time", cases.LAST), ("layer_norm", cases.ROWS)}
    assert {(row.part, row.layout) for row in timed if row.peer == names.OURS} == every
    assert not [row.note for row in measured if row.note]
    assert all(row.share > 0 and row.host > 0 and row.instances == 2 for row in timed)
    assert cases.NO_NORM in {row.peer for row in measured if row.part == "training"}
    assert files.figure().stat().st_size > 10_000


@pytest.mark.peers
@pytest.mark.filterwarnings("default")  # the peers' own, of what they import
@pytest.mark.parametrize(
    ("arguments", "entered"),
    [
        (["--device", "rehearsal", "--only", "agreement", "time"], {names.LINEN, names.TORCH}),
        (
            ["--quick", "--only", "agreement", "--shapes", "6,5,4,3", "--dtype", "f32", "bf16"],
            {*cases.FLAX, names.TORCH},
        ),
    ],
    ids=["rehearsal", "cpu"],
)
def test_the_peers_take_part_and_agree(arguments, entered, tmp_path):
    EXPERIMENT.main([*arguments, "--out", str(tmp_path), "--peers", *sorted(entered)])
    (file,) = (tmp_path / "results").glob("*.csv")
    measured = rows.load(file, Row)
    assert not [row.note for row in measured if row.note]
    for part in {"agreement", *arguments} & cases.PARTS.keys():
        assert entered <= {row.peer for row in measured if row.part == part}


# What is asked for.


def chosen(*arguments):
    options = EXPERIMENT.parser().parse_args(arguments)
    return speed.choose(cases.QUICK if options.quick else cases.Job(), options)


def test_what_is_asked_for(monkeypatch):
    assert chosen() == cases.Job()
    assert chosen("--quick") == cases.QUICK
    assert chosen("--device", "rehearsal", "--quick") == cases.REHEARSAL
    assert chosen("--contestants", names.TORCH, "--dtype", "f32") == dataclasses.replace(
        cases.Job(), peers=(names.TORCH,), dtypes=("f32",)
    )
    assert chosen("--shapes", "8,8", "9,9").few >= {(8, 8), (9, 9)}
    h200 = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200")
    monkeypatch.setattr("jax.devices", lambda: [h200])
    assert chosen("--device", "gpu") == cases.GPU
    assert chosen("--device", "gpu", "--quick") == cases.GPU_QUICK
    kept = dataclasses.replace(cases.Job(), memory="kept")
    assert [speed.stem(job) for job in (cases.Job(), kept, cases.REHEARSAL, cases.GPU)] == [
        *("speed", "speed_kept-memory"),
        *("speed_rehearsal", "speed_nvidia-h200"),
    ]
    monkeypatch.setattr(speed, "present", lambda job: (job, {}))
    assert all(speed.is_whole(job) for job in (cases.Job(), kept, cases.GPU))
    assert not any(map(speed.is_whole, (cases.QUICK, cases.REHEARSAL, cases.GPU_QUICK)))


def test_without_a_gpu_it_says_what_to_do():
    with pytest.raises(UserError, match=r"finds none here \(cpu\).*--device rehearsal"):
        chosen("--device", "gpu")


def test_nobody_is_not_a_race(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    nobody, left_out = speed.present(dataclasses.replace(cases.Job(), peers=cases.IN_TORCH))
    assert left_out.keys() == set(cases.IN_TORCH)
    with pytest.raises(UserError, match="none of them can run here"):
        measure.measure(nobody, Files(tmp_path, "speed"))


# Rows.


def test_what_raises_is_a_row_and_stops_no_other(tmp_path, monkeypatch):
    def broken(self, row):
        raise MemoryError("out of memory\nand more")

    monkeypatch.setattr(measure.Parts, "_agreement", broken)
    (tmp_path / "results").mkdir()
    files = Files(tmp_path, "speed")
    job = dataclasses.replace(cases.QUICK, parts=("agreement", "compile"), peers=(names.OURS,))
    measure.measure(job, files)
    measured = rows.load(files.csv(), Row)
    assert {(row.part, row.note) for row in measured} == {
        ("agreement", f"{FAILED}MemoryError: out of memory"),
        ("compile", ""),
    }


@pytest.mark.parametrize(
    ("peer", "error", "starts"),
    [
        (names.OURS_PALLAS, ValueError("implementation='pallas' cannot serve x"), NOT_SERVED),
        (names.OURS, ValueError("implementation='auto' cannot serve x"), FAILED),
        (names.OURS_PALLAS, RuntimeError("implementation=: illegal address"), FAILED),
    ],
    ids=["refused", "auto", "crashed"],
)
def test_only_what_is_asked_for_by_name_may_refuse(peer, error, starts):
    row = because(Row("gpu", "time", (8,), "f32", cases.LAST, peer, cases.BOTH), error)
    assert row.note.startswith(starts)
    assert row.failed == (starts == FAILED)


def test_a_share_is_of_the_copy(monkeypatch):
    work = measure.Parts(dataclasses.replace(cases.GPU, peers=()))
    work._bandwidth = 4e9  # bytes a millisecond
    row = Row("gpu", "layer_norm", (1000, 1_000_000), "f32", cases.ROWS, "", cases.BOTH)
    monkeypatch.setattr(work, "_race", lambda *_: [dataclasses.replace(row, median=2.0)])
    (timed,) = work._layer(row)
    assert timed.share == 5 * row.bytes / 2.0 / 4e9
