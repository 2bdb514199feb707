"""What is to be measured on a GPU is rehearsed without one, and judged as it is measured."""

import dataclasses
import importlib.util
import json
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import (
    gpu,
    gpu_run_accuracy,
    gpu_run_bits,
    gpu_run_claims,
    gpu_run_contenders,
    gpu_run_device,
    gpu_run_figure,
    gpu_run_rows,
    gpu_run_tables,
)
from experiments.accuracy_claims import CLAIMS
from experiments.benchmark_layers import BOTH, PASSES
from experiments.gpu_run_agreement import DIFFERS
from experiments.gpu_run_contenders import AUTO, BATCH_NORMS, EQUINOX, FLAX, OURS_BY, XLA
from experiments.gpu_run_job import (
    FIRST,
    LARGE,
    LAST,
    QUICK,
    REHEARSAL,
    ROWS,
    WHOLE,
    batch_norms,
    layer_norms,
)
from experiments.gpu_run_layers import Setting
from experiments.gpu_run_rows import (
    ACCURACY,
    AGREEMENT,
    BITS,
    COPY,
    FAILED,
    LAYER_NORM,
    LAYERS,
    NOT_SERVED,
    PARTS,
    TRAIN,
    Files,
    Row,
)
from experiments.gpu_run_timing import Taken, Times, interleave
from experiments.gpu_run_torch import COMPILED, TORCH
from experiments.gpu_run_train import build, initial

TRITON = OURS_BY["pallas_triton"]


def test_a_rehearsal_measures_every_part_and_can_be_added_to(tmp_path, capsys):
    # One test: it takes some 15 seconds, and its parts may be run by several processes.
    csv, about, figure = (
        tmp_path / name
        for name in ("results/gpu_cpu.csv", "results/gpu_cpu.json", "figures/gpu_cpu.png")
    )
    rehearsal = ["--device", "cpu", "--quick", "--out", str(tmp_path)]
    # Every claim holds but those on speed.
    assert gpu.main(rehearsal) == 0
    rows = gpu_run_rows.load(csv)
    assert {row.part for row in rows} == {COPY, *PARTS}
    timed = [row for row in rows if row.part in (LAYERS, LAYER_NORM)]
    for contender in (AUTO, XLA, EQUINOX):
        found = {(row.part, row.layout) for row in timed if row.contender == contender}
        assert found == {(LAYERS, FIRST), (LAYERS, LAST), (LAYER_NORM, ROWS)}
    for row in timed:
        assert not row.note
        assert 0 < row.low <= row.median <= row.high
        assert row.share > 0
        assert row.instances == 2
    written = json.loads(about.read_text())
    assert {"device", "jax", "equinox", "platform"} <= set(written["environment"])
    assert written["job"] == "rehearsal"
    silent = [claim for claim in written["claims"] if claim["holds"] is None]
    assert {claim["measured"] for claim in silent} == {"says nothing on a CPU"}
    assert len(silent) == 8
    assert figure.stat().st_size > 10_000

    assert gpu.main([*rehearsal, "--part", ACCURACY, "--without", "torch", "flax"]) == 0
    after = gpu_run_rows.load(csv)
    kept = [repr(row) for row in rows if row.part != ACCURACY]  # a NaN is not itself
    assert [repr(row) for row in after if row.part != ACCURACY] == kept
    assert len(after) == len(rows)
    assert set(json.loads(about.read_text())["seconds"]) == set(PARTS)
    assert f"{FLAX} is left out: as was asked for" in capsys.readouterr().out


def has(monkeypatch, **device):
    found = type("Device", (), device)
    monkeypatch.setattr(gpu_run_device.jax, "devices", lambda: [found])


def test_without_a_gpu_it_says_what_to_do(monkeypatch, capsys, tmp_path):
    has(monkeypatch, platform="cpu")
    with pytest.raises(SystemExit) as exit_:
        gpu.main(["--out", str(tmp_path)])
    assert exit_.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "JAX finds none here (cpu)" in said
    assert "python -m experiments.gpu --device cpu" in said
    assert not list(tmp_path.iterdir())


def test_files_are_named_after_the_device(monkeypatch):
    has(monkeypatch, platform="gpu", device_kind="NVIDIA H200")
    assert gpu_run_device.stem() == "gpu_nvidia-h200"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--part", "speed"], "--part: invalid choice: 'speed'"),
        (["--without", "equinox"], "--without: invalid choice: 'equinox'"),
        (["--device", "tpu"], "--device: invalid choice: 'tpu'"),
        (["--dtype", "f16"], "--dtype: invalid choice: 'f16'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_arguments_end_with_a_sentence(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        gpu.main(arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_an_output_folder_that_cannot_be_made_is_known_before_the_measuring(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as exit_:
        gpu.main(["--device", "cpu", "--out", str(tmp_path / "file")])
    assert exit_.value.code == 2
    assert "file/results cannot be made (Not a directory)" in capsys.readouterr().err


def parsed(*arguments):
    return gpu.parser().parse_args(arguments)


def test_what_is_asked_for():
    assert gpu.job(parsed()) == WHOLE
    assert gpu.job(parsed("--quick")) == QUICK
    assert gpu.job(parsed("--device", "cpu", "--quick")) == REHEARSAL
    assert {problem.dtype for problem in gpu.job(parsed("--dtype", "f32")).layers} == {"f32"}
    assert len(QUICK.cases) == 4


def test_what_is_not_there_is_left_out_and_said(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    asked = gpu_run_contenders.left_out(["pallas_triton"], gpu=True, torch_compile=True)
    assert set(asked) == {FLAX, TORCH, COMPILED, TRITON}
    on_a_cpu = gpu_run_contenders.left_out([], gpu=False, torch_compile=False)
    assert set(on_a_cpu) == {FLAX, TORCH, COMPILED, *OURS_BY.values()} - {AUTO, XLA}


def test_files_of_another_environment_are_not_added_to(tmp_path, capsys):
    row = Row(BITS, "4x8", LAST, "f32", "forward", AUTO, value=0.0)
    about = {"job": "whole", "environment": {"jax": "1"}}
    files = Files(tmp_path, "gpu_test", about)
    assert files.earlier() == []
    files.save([row])
    files.describe({}, {BITS: 1.0})
    assert list(map(repr, Files(tmp_path, "gpu_test", about).earlier())) == [repr(row)]
    other = Files(tmp_path, "gpu_test", {"job": "whole", "environment": {"jax": "2"}})
    assert other.earlier() == []
    assert "measured with something else" in capsys.readouterr().out


def test_rows_are_replaced_by_part_and_dtype():
    def rows(parts, dtypes, value):
        return [Row(p, "8", LAST, d, BOTH, AUTO, value=value) for p in parts for d in dtypes]

    crashed = Row(LAYERS, "", "", "", "", "all", note=f"{FAILED}x")
    old = [*rows((BITS, LAYERS), ("f32", "bf16"), 0.0), crashed]
    found = gpu_run_rows.replaced(old, rows((LAYERS,), ("bf16",), 1.0))
    assert {(row.part, row.dtype): row.value for row in found} == {
        (BITS, "f32"): 0.0,
        (BITS, "bf16"): 0.0,
        (LAYERS, "f32"): 0.0,
        (LAYERS, "bf16"): 1.0,
    }


# The arrays.


def test_programs_outlast_the_cache_and_the_launch():
    whole = [*batch_norms(WHOLE.images, WHOLE.dtypes), *layer_norms(WHOLE.widths, WHOLE.dtypes)]
    assert len(whole) == 18 * 2 * 2 + 6 * 2
    for problem in whole:
        instances = problem.instances(WHOLE.most_instances)
        # x, dy, y and dx, beside the 60 MB of an H200's L2.
        assert 4 * instances * problem.bytes > 120e6
        assert math.prod(problem.given) == math.prod(problem.shape)


def test_what_takes_long_to_compile_is_there_where_it_matters():
    setting = Setting(LAYERS, (*OURS_BY.values(), TORCH, COMPILED), 1, 0.0, 1, math.nan, "cuda")
    small, large = batch_norms(((32, 512, 7, 7), (256, 64, 112, 112)), ("f32",))[::2]
    assert small.bytes < LARGE < large.bytes
    assert setting.entered(small, "forward") == [AUTO, XLA, TORCH]
    assert setting.entered(small, BOTH) == [*OURS_BY.values(), TORCH]
    assert setting.entered(large, BOTH) == [*OURS_BY.values(), TORCH, COMPILED]


def test_the_network_has_the_arrays_of_a_resnet():
    found = []

    def make(channels, relu):
        made = BATCH_NORMS[AUTO](channels, relu)

        def apply(layer, state, x):
            found.append((*x.shape[1:], relu))
            return made.apply(layer, state, x)

        return made._replace(apply=apply)

    sizes = WHOLE.network
    network, states = build(make, eqx.filter_eval_shape(initial, sizes, jnp.bfloat16))
    images = jax.ShapeDtypeStruct((2, 3, sizes.image, sizes.image), jnp.bfloat16)
    logits, _ = eqx.filter_eval_shape(network, images, states)
    assert (logits.shape, logits.dtype) == ((2, 1000), jnp.float32)
    assert len(found) == 17
    assert {(64, 112, 112, True), (256, 56, 56, False), (2048, 7, 7, False)} <= set(found)


# Timing.


class Steady:
    """Takes so many seconds a call."""

    def __init__(self, seconds, instances=1, fails_after=10**9):
        self.seconds, self.instances, self.left = seconds, instances, fails_after

    def time(self, calls):
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("out of memory")
        return Taken(self.seconds * calls, self.seconds / 2)


def test_a_timing_is_long_enough_and_one_that_raises_stops_no_other():
    def broken():
        raise ValueError("no such layer")

    found = interleave(
        {
            "steady": lambda: Steady(0.001, instances=4),
            "broken": broken,
            "breaks": lambda: Steady(0.002, fails_after=5),
        },
        rounds=3,
        least=0.01,
    )
    steady = found["steady"]
    assert isinstance(steady, Times)
    assert (steady.calls, steady.instances, len(steady.seconds)) == (10, 4, 3)
    np.testing.assert_allclose(steady.seconds, 0.001 / 4)
    np.testing.assert_allclose(steady.host, 0.0005 / 4)
    assert str(found["broken"]) == "no such layer"
    assert str(found["breaks"]) == "out of memory"


def test_a_share_is_of_the_copy():
    times = interleave({"it": lambda: Steady(0.002)}, 3, 0.01)["it"]
    row = gpu_run_rows.timed(Row(LAYERS, "8", LAST, "f32", BOTH, AUTO), times, 4e9, 4000.0)
    assert row.median == pytest.approx(2.0)
    assert row.value == pytest.approx(2000)
    assert row.share == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("contender", "error", "starts"),
    [
        (TRITON, ValueError("implementation='pallas_triton' cannot serve x"), NOT_SERVED),
        (AUTO, ValueError("implementation='auto' cannot serve x"), FAILED),
        (TRITON, RuntimeError("implementation='pallas_triton': illegal address"), FAILED),
        (EQUINOX, MemoryError("out of memory\nand more"), FAILED),
    ],
    ids=["refused", "auto", "crashed", "peer"],
)
def test_only_what_is_asked_for_by_name_may_refuse(contender, error, starts):
    row = gpu_run_rows.because(Row(LAYERS, "8", LAST, "f32", BOTH, contender), error)
    assert row.note.startswith(starts)
    assert "\n" not in row.note
    assert row.failed == (starts == FAILED)


# Bits and accuracy, of layers that are wrong.


def test_a_bit_that_differs_is_counted():
    calls = iter(range(10))

    def program(leaves, x, dy):
        # The third call, and the sixth, is off by the sign of a zero.
        return x, [jnp.int32(1)], (-dy if next(calls) % 3 == 2 else dy,)

    counted = gpu_run_bits._count(program, [], jnp.ones(3, jnp.bfloat16), jnp.zeros(3), 7)
    assert counted == {"forward": 0.0, "backward": 2.0}


# Verdicts.


def timing(part, what, contender, median, **fields):
    spread = {"low": 0.99 * median, "high": 1.01 * median}
    layout = fields.pop("layout", {LAYERS: LAST, LAYER_NORM: ROWS}.get(part, ""))
    row = Row(part, what, layout, "f32", fields.pop("program", BOTH), contender, LARGE + 1)
    return dataclasses.replace(row, median=median, share=0.9, **{**spread, **fields})


def good():
    """Rows of which every claim holds."""
    rows = [Row(COPY, "1 MiB", "", "f32", COPY, "JAX, copy", value=4000.0)]
    for name in (AUTO, XLA):
        rows += [Row(BITS, "8", LAST, "f32", p, name, value=0.0, calls=100) for p in PASSES]
        for quantity in ("y", "variance", "dx", "dweight", "dbias", "nonfinite"):
            for case in (
                "mean/std = 1e3",
                "constants to 1, n = 7",
                "bfloat16, mean 100, std 1",
            ):
                rows.append(Row(ACCURACY, case, FIRST, "f32", quantity, name, value=0.0))
        rows.append(Row(AGREEMENT, "8", LAST, "f32", BOTH, name, value=1e-6))
    times = {AUTO: 1.0, XLA: 1.2, EQUINOX: 2.0, TORCH: 1.5, COMPILED: 1.1}
    for part, name in ((p, n) for p in (LAYERS, LAYER_NORM) for n in times):
        rows.append(timing(part, "8x8", name, times[name]))
    rows += [timing(LAYERS, "8x8", n, t, layout=FIRST) for n, t in ((AUTO, 1.0), (TORCH, 1.05))]
    rows += [timing(TRAIN, "8", name, times[name], program="step") for name in (AUTO, XLA)]
    return rows


def changed(part, contender, **fields):
    """The good rows, with those of one contender in one part changed."""
    return [
        dataclasses.replace(row, **fields)
        if (row.part, row.contender) == (part, contender)
        else row
        for row in good()
    ]


def failing(rows, gpu=True):
    verdicts = gpu_run_claims.judge(rows, gpu=gpu)
    return [verdict.claim.split(". ", 1)[1] for verdict in verdicts if verdict.holds is False]


def slow(median):
    return {"median": median, "low": 0.99 * median, "high": 1.01 * median}


def test_what_is_good_holds():
    verdicts = gpu_run_claims.judge(good(), gpu=True)
    assert all(verdict.holds for verdict in verdicts)
    assert gpu_run_tables.claims(verdicts).count("| holds") == len(verdicts) == 13
    assert len(gpu_run_accuracy.judge(good())[FIRST, AUTO]) == len(CLAIMS)


@pytest.mark.parametrize(
    ("rows", "claims"),
    [
        (changed(BITS, XLA, value=1.0), ["the same bits"]),
        (changed(AGREEMENT, XLA, value=0.5, note=DIFFERS), ["all that is timed"]),
        (changed(ACCURACY, XLA, value=1.0), [f"accuracy, {XLA}"]),
        (changed(LAYERS, AUTO, share=0.84), [f"batch norm, {LAST}", f"batch norm, {FIRST}"]),
        (changed(LAYER_NORM, AUTO, share=0.84), ["layer norm, over 100 MB"]),
        (changed(LAYERS, AUTO, share=0.1, bytes=LARGE), []),
        (changed(LAYERS, EQUINOX, **slow(1.4)), ["1.5 times as fast", "and so on every"]),
        (changed(LAYERS, COMPILED, **slow(0.9)), ["batch norm: no slower than PyTorch"]),
        (changed(LAYERS, TORCH, **slow(0.9)), ["batch norm: no slower than PyTorch"]),
        (changed(LAYER_NORM, TORCH, **slow(0.9)), ["layer norm: no slower than PyTorch"]),
        (changed(LAYERS, XLA, **slow(0.9)), ["never slower than XLA"]),
        (changed(LAYER_NORM, XLA, **slow(0.9)), ["never slower than XLA"]),
        (changed(TRAIN, XLA, **slow(0.9)), ["never slower than XLA"]),
        # Within what two timings of one program differ by, or within the quartiles.
        (changed(TRAIN, XLA, **slow(0.98)), []),
        (changed(TRAIN, XLA, median=0.9, low=0.8, high=1.1), []),
        (changed(LAYERS, EQUINOX, note=f"{FAILED}x"), ["nothing failed"]),
    ],
    ids=[
        "bits",
        "agreement",
        "accuracy",
        "share of batch norm",
        "share of layer norm",
        "share of a small array",
        "Equinox",
        "torch compiled",
        "torch",
        "torch, layer norm",
        "XLA",
        "XLA, layer norm",
        "XLA, training",
        "hardly slower",
        "within the spread",
        "a peer failed",
    ],
)
def test_each_verdict_follows_its_rows(rows, claims):
    found = failing(rows)
    assert len(found) == len(claims)
    for said, expected in zip(found, claims, strict=True):
        assert said.startswith(expected)


def test_the_average_over_equinox_and_the_least_are_two_claims():
    rows = [*good(), timing(LAYERS, "9x9", AUTO, 1.0), timing(LAYERS, "9x9", EQUINOX, 1.3)]
    assert failing(rows) == ["and so on every array"]


def test_a_time_that_was_the_hosts_is_said_to_be():
    rows = changed(LAYERS, TORCH, **slow(0.9))
    verdicts = gpu_run_claims.judge(rows, gpu=True)
    assert not any("waiting for the host" in verdict.measured for verdict in verdicts)
    rows = [dataclasses.replace(row, host=row.median) for row in rows]
    verdicts = gpu_run_claims.judge(rows, gpu=True)
    (slower,) = (verdict for verdict in verdicts if verdict.holds is False)
    assert "slower on 2 of 2, on 2 waiting for the host" in slower.measured
    assert "1.00* 90%" in gpu_run_tables.report(rows, verdicts, gpu=True)


def test_nothing_measured_is_not_called_good():
    verdicts = gpu_run_claims.judge([], gpu=True)
    assert [verdict.holds for verdict in verdicts[:-1]] == [None] * (len(verdicts) - 1)


def test_on_a_cpu_speed_is_not_judged():
    assert failing(changed(LAYERS, XLA, **slow(0.1)), gpu=False) == []


def test_where_auto_should_have_chosen_otherwise_is_listed():
    assert gpu_run_tables.choices(gpu_run_claims.timings(good())) == ""
    faster = [*good(), timing(LAYERS, "8x8", TRITON, 0.5)]
    table = gpu_run_tables.choices(gpu_run_claims.timings(faster))
    assert f"8x8 {LAST} f32 {BOTH}" in table
    assert TRITON in table


def test_the_file_holds_all_that_tables_verdicts_and_figure_need(tmp_path):
    files = Files(tmp_path, "gpu_nvidia-test", {})
    files.save(good())
    loaded = gpu_run_rows.load(files.csv)
    of_both = [
        gpu_run_tables.report(rows, gpu_run_claims.judge(rows, gpu=True), gpu=True)
        for rows in (good(), loaded)
    ]
    assert of_both[0] == of_both[1]
    drawn = []
    for _ in range(2):
        (figure,) = gpu_run_figure.draw(tmp_path, files.csv.stem)
        drawn.append(figure.read_bytes())
    assert drawn[0] == drawn[1]


@pytest.mark.peers
def test_the_peers_take_part(tmp_path, capsys):
    assert (
        gpu.main(["--device", "cpu", "--part", AGREEMENT, LAYERS, "--out", str(tmp_path)]) == 0
    )
    rows = gpu_run_rows.load(tmp_path / "results" / "gpu_cpu.csv")
    for part in (AGREEMENT, LAYERS):
        assert {FLAX, TORCH} <= {row.contender for row in rows if row.part == part}
    assert not [row for row in rows if row.failed]
