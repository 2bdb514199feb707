"""`compare` names where two ledgers part first, and by how much, and ends with a status."""

import io
import os
import subprocess
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from eqx_norm.determinism import LedgerError, compare, monitor, read, recorded
from eqx_norm.determinism.__main__ import main
from eqx_norm.determinism._compare import difference
from tests.determinism.harness import X, forge, written
from tests.helpers import f32
from tests.processes import ROOT, python


def loss(x, weight):
    h = monitor(jnp.tanh(x), "h")
    y = lax.cond(
        weight[0] > 0, lambda h: monitor(h * weight, "yes"), lambda h: monitor(h, "no"), h
    )
    return jnp.sum(monitor(y, "y") ** 2)


step = jax.jit(recorded(jax.value_and_grad(loss)))
keeping = jax.jit(recorded(jax.value_and_grad(loss), keep_values=True))
WEIGHT = f32([1, 2, 3])
CHANGED = f32([1, 2, 3 + 3 * 2**-22])  # by 3 ulp


def run(path, *weights, step=step, start=0):
    return written(path, *(step(X, weight)[1] for weight in weights), start=start)


def test_the_same(tmp_path):
    pair = [run(tmp_path / name, *3 * [WEIGHT]) for name in "ab"]
    says = "the same: 24 rows of 3 steps agree, to the bit"
    assert compare(*pair) == (True, 24, says, None, None, None)
    assert main(["compare", *map(str, pair)]) == 0
    forge(pair[1], 0, jax="0.0.1")
    says += f"\n  they were written with different jax: {jax.__version__} and 0.0.1"
    assert compare(*pair) == (True, 24, says, None, None, None)


def test_the_first_difference_is_named(tmp_path, capsys):
    a = run(tmp_path / "a", WEIGHT, WEIGHT, WEIGHT)
    b = run(tmp_path / "b", WEIGHT, CHANGED, CHANGED)
    verdict = compare(a, b)
    assert verdict == (False, 10, str(verdict), 1, "yes", "forward")
    lines = str(verdict).split("\n  ")
    assert lines[0] == "step 1: `yes` forward"
    assert lines[1].startswith("fingerprints ")
    assert "values were not kept: recorded(step, keep_values=True)" in lines[2]
    assert lines[3] == "before it, 10 rows agree; the last is step 1: `no` forward"
    assert main(["compare", str(a), str(b)]) == 1
    assert capsys.readouterr().out == f"{verdict}\n"


def test_kept_values_say_by_how_much(tmp_path):
    a = run(tmp_path / "a", WEIGHT, step=keeping)
    b = run(tmp_path / "b", CHANGED, step=keeping)
    contents = read(a)
    h = contents.values(contents.rows[0])
    y, other = (h * np.asarray(weight) for weight in (WEIGHT, CHANGED))
    ulps = np.abs(y.view(np.int32) - other.view(np.int32)).max()
    text = str(compare(a, b))
    assert "2 of 6 elements differ" in text
    assert f"the first is [0, 2]: {y[0, 2]!s} and {other[0, 2]!s}" in text
    assert f"max difference {np.abs(y - other).max():.6g}, {ulps} ulp" in text


def test_another_branch_shape_or_dtype(tmp_path):
    a, b = run(tmp_path / "a", WEIGHT, WEIGHT), run(tmp_path / "b", WEIGHT, -WEIGHT)
    verdict = compare(a, b)
    assert (verdict.step, verdict.probe) == (1, "no")
    assert f"only {b} has passed it: the other took another branch" in str(verdict)
    identity = jax.jit(recorded(lambda x: monitor(x, "x")))
    xs = {"x": X, "y": X[:1], "z": X.astype(jnp.bfloat16)}
    x, y, z = (written(tmp_path / name, identity(x)[1]) for name, x in xs.items())
    assert "shape: (2, 3) and (1, 3)\n  nothing comes before it" in str(compare(x, y))
    assert "dtype: float32 and bfloat16" in str(compare(x, z))


def test_what_cannot_be_compared_is_an_error(tmp_path, capsys):
    a, b = run(tmp_path / "a", WEIGHT), run(tmp_path / "b", WEIGHT, start=1)
    with pytest.raises(LedgerError, match="step 0: `h` forward, the other has step 1: `h`"):
        compare(a, b)
    other = jax.jit(recorded(lambda x, weight: monitor(x, "other")))
    with pytest.raises(LedgerError, match="not of the same program.*`h` forward.*`other`"):
        compare(a, run(tmp_path / "c", WEIGHT, step=other))
    nothing = jax.jit(recorded(lambda x, weight: x))
    pair = [run(tmp_path / name, WEIGHT, WEIGHT, step=nothing) for name in "xy"]
    assert main(["compare", *map(str, pair)]) == 2
    told = capsys.readouterr().err
    assert "have no rows: nothing was recorded" in told
    assert "monitor_module(model) inside of the function that" in told
    assert f"{pair[0]} ends before step 0: `h` forward" in str(compare(pair[0], a))


def test_what_was_cut_off_or_ends_is_never_the_same(tmp_path):
    whole = run(tmp_path / "whole", WEIGHT, WEIGHT)
    content = whole.read_bytes()
    # In its last row, and in the same row of a run that differs there.
    a, b, ends = (tmp_path / name for name in ("a", "b", "ends"))
    a.write_bytes(content[:-100])
    b.write_bytes(content[:-100] + b"something else")
    ends.write_bytes(content[: content[:-1].rindex(b"\n") + 1])
    for pair in ((a, b), (a, ends), (ends, b)):
        verdict = compare(*pair)
        assert (verdict.same, verdict.agreed, verdict.step) == (False, 15, None)
        assert str(verdict).startswith(
            "not known to be the same: 15 rows of 2 steps agree, to the bit, and what came next"
        )
        assert str(verdict).count("is incomplete: the run was killed") == len({*pair} - {ends})
        assert main(["compare", *map(str, pair)]) == 1
    for shorter in (a, ends):
        verdict = compare(shorter, whole)
        assert (verdict.same, verdict.agreed, verdict.step) == (False, 15, None)
        says = f"{shorter} ends before step 1: `h` cotangent, with which {whole} goes on"
        assert says in str(verdict)


def test_values_of_another_run_do_not_hide_where_runs_part(tmp_path):
    a = run(tmp_path / "a", WEIGHT, step=keeping)
    b = run(tmp_path / "b", 2 * WEIGHT, step=keeping)
    values = tmp_path / "b.values" / "0"
    values.write_bytes((tmp_path / "a.values" / "0").read_bytes())
    verdict = compare(a, b)
    assert (verdict.same, verdict.step, verdict.probe) == (False, 0, "yes")
    assert f"{b} has values kept in {values.resolve()}, which " in str(verdict)
    assert "elements differ" not in str(verdict)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (f32([1, 2]), f32([1, 2.5]), "max difference 0.5, 2097152 ulp"),
        (f32([0.0]), f32([-0.0]), "max difference 0, 0 ulp"),
        (f32([np.inf, 1]), f32([1, 2]), "1 of them are not finite in one or both"),
        (np.array([0], np.uint64), np.array([2**64 - 1], np.uint64), f"{2**64 - 1}"),
        (np.array([True]), np.array([False]), "the first is [0]: True and False"),
        (np.array([1 + 1j], np.complex64), np.array([1 + 2j], np.complex64), "8388608 ulp"),
        (np.array([1.7e308]), np.array([-1.7e308]), "max difference inf, "),
        (np.array([1.0]), np.array([-1.0]), "max difference 2, 9214364837600034816 ulp"),
        (jnp.bfloat16(1), jnp.bfloat16(2), "the first is []: 1 and 2; max difference 1, 128"),
    ],
    ids=map(str, range(9)),
)
def test_differences(a, b, expected):
    assert expected in "; ".join(difference(np.asarray(a), np.asarray(b)))


# --- The command line.


def test_help_teaches_and_bad_arguments_end_with_2():
    told = python("-m", "eqx_norm.determinism", "--help").stdout
    for word in ("compare", "monitor_module", "recorded(train_step", "exit status: 0"):
        assert word in told
    for arguments in ([], ["compare", "a"]):
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
    assert main(["compare", "no such file", "neither"]) == 2


def test_what_the_terminal_cannot_show_is_escaped(tmp_path, monkeypatch):
    step = recorded(lambda x: monitor(x, "größe→\x1b[2J\n\ud800"))
    xs = {"ä": X, "b": 2 * X}
    paths = [str(written(tmp_path / name, step(x)[1])) for name, x in xs.items()]
    terminal = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(terminal, "latin-1"))
    assert main(["compare", *paths]) == 1
    shown = terminal.getvalue().decode("latin-1")
    assert shown.startswith("step 0: `größe\\u2192\\x1b[2J\\n\\ud800` forward\n")


def test_a_full_disk_is_an_error(tmp_path, monkeypatch, capsys):
    pair = [str(run(tmp_path / name, WEIGHT)) for name in "ab"]
    says = "The output cannot be written (No space left on device).\n"
    with open("/dev/full", "w") as full:
        # As a process, since Python writes once more when it ends.
        command = [sys.executable, "-m", "eqx_norm.determinism", "compare", *pair]
        ended = subprocess.run(
            command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (ended.returncode, ended.stderr) == (2, says)
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["--help"]) == 2
    assert capsys.readouterr().err == says


def test_who_does_not_read_on_is_no_error(tmp_path, monkeypatch, capsys):
    """`| head`, and `>&-`, for which Python has no stdout."""
    pair = [str(run(tmp_path / name, WEIGHT)) for name in "ab"]
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as nobody:
        for stdout in (nobody, None):
            monkeypatch.setattr(sys, "stdout", stdout)
            assert main(["compare", *pair]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("failure", "says"),
    [
        (KeyboardInterrupt, "Interrupted.\n"),
        (MemoryError, "There is not enough memory for these ledgers.\n"),
    ],
)
def test_what_stops_it_is_told_in_one_line(failure, says, capsys):
    with mock.patch("eqx_norm.determinism.__main__.compare", side_effect=failure):
        assert main(["compare", "a", "b"]) == 2
    assert capsys.readouterr() == ("", says)
