"""`compare` names where two ledgers part first, and by how much, and ends with a status."""

import contextlib
import io
import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from eqx_norm.determinism import (
    LedgerError,
    compare,
    fingerprint,
    hexadecimal,
    monitor,
    read,
    recorded,
)
from eqx_norm.determinism.__main__ import main
from eqx_norm.determinism._compare import difference
from tests.determinism.harness import X, sealed, with_header, written
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
WEIGHT = jnp.array([1.0, 2.0, 3.0])


def run(path, *weights, step=step, start=0):
    return written(path, *(step(X, weight)[1] for weight in weights), start=start)


def changed(place, ulps):
    weight = np.array(WEIGHT)
    weight.view(np.int32)[place] += ulps
    return jnp.asarray(weight)


def test_the_same(tmp_path):
    pair = [run(tmp_path / name, *3 * [WEIGHT]) for name in "ab"]
    says = "the same: 24 rows of 3 steps agree, to the bit"
    assert compare(*pair) == (True, 24, says, None, None, None)
    assert main(["compare", *map(str, pair)]) == 0
    with_header(pair[1], jax="0.0.1")
    says += f"\n  they were written with different jax: {jax.__version__} and 0.0.1"
    assert compare(*pair) == (True, 24, says, None, None, None)


def test_the_first_difference_is_named(tmp_path, capsys):
    a = run(tmp_path / "a", WEIGHT, WEIGHT, WEIGHT)
    b = run(tmp_path / "b", WEIGHT, changed(1, ulps=1), changed(1, ulps=1))
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
    weights = WEIGHT, changed(2, ulps=3)
    a, b = (
        run(tmp_path / name, w, step=keeping) for name, w in zip("ab", weights, strict=True)
    )
    contents = read(a)
    h = contents.values(contents.rows[0])
    y, other = (h * np.asarray(weight) for weight in weights)
    ulps = np.abs(y.view(np.int32) - other.view(np.int32)).max()
    text = str(compare(a, b))
    assert "2 of 6 elements differ" in text
    assert f"the first is [0, 2]: {y[0, 2]!s} and {other[0, 2]!s}" in text
    assert f"max difference {np.abs(y - other).max():.6g}, {ulps} ulp" in text


def test_another_branch(tmp_path):
    a, b = run(tmp_path / "a", WEIGHT, WEIGHT), run(tmp_path / "b", WEIGHT, -WEIGHT)
    verdict = compare(a, b)
    assert (verdict.step, verdict.probe) == (1, "no")
    assert f"only {b} has passed it: the other took another branch" in str(verdict)


def test_shapes_and_dtypes(tmp_path):
    identity = jax.jit(recorded(lambda x: monitor(x, "x")))
    xs = {"a": X, "b": X[:1], "c": X.astype(jnp.bfloat16)}
    a, b, c = (written(tmp_path / name, identity(x)[1]) for name, x in xs.items())
    assert "shape: (2, 3) and (1, 3)" in str(compare(a, b))
    assert "dtype: float32 and bfloat16" in str(compare(a, c))
    assert "nothing comes before it" in str(compare(a, c))


def test_a_run_that_went_on(tmp_path):
    a, b = (run(tmp_path / str(steps), *steps * [WEIGHT]) for steps in (2, 3))
    verdict = compare(a, b)
    assert (verdict.same, verdict.agreed, verdict.step) == (False, 16, None)
    assert f"{a} ends before step 2: `h` forward, with which {b} goes on" in str(verdict)


def test_another_program_is_an_error(tmp_path, capsys):
    a, b = run(tmp_path / "a", WEIGHT), run(tmp_path / "b", WEIGHT, start=1)
    with pytest.raises(LedgerError, match="step 0: `h` forward, the other has step 1: `h`"):
        compare(a, b)
    other = jax.jit(recorded(lambda x, weight: monitor(x, "other")))
    with pytest.raises(LedgerError, match="not of the same program.*`h` forward.*`other`"):
        compare(a, run(tmp_path / "c", WEIGHT, step=other))
    assert main(["compare", str(a), str(b)]) == 2
    assert "the same probes and the same steps" in capsys.readouterr().err


def test_nothing_recorded_is_never_the_same(tmp_path, capsys):
    nothing = jax.jit(recorded(lambda x, weight: x))
    pair = [run(tmp_path / name, WEIGHT, WEIGHT, step=nothing) for name in "ab"]
    assert main(["compare", *map(str, pair)]) == 2
    told = capsys.readouterr().err
    assert "have no rows: nothing was recorded" in told
    assert "monitor_module(model) inside of the function that" in told
    verdict = compare(pair[0], run(tmp_path / "c", WEIGHT))
    assert not verdict.same
    assert f"{pair[0]} ends before step 0: `h` forward" in str(verdict)


def test_what_was_cut_off_is_never_the_same(tmp_path):
    content = run(tmp_path / "whole", WEIGHT, WEIGHT).read_bytes()
    # In its last row, and in the same row of a run that differs there.
    cut = [tmp_path / "a", tmp_path / "b"]
    cut[0].write_bytes(content[:-100])
    cut[1].write_bytes(content[:-100] + b"something else")
    ends = tmp_path / "c"
    ends.write_bytes(content[: content[:-1].rindex(b"\n") + 1])
    for pair in ((cut[0], cut[1]), (cut[0], ends), (ends, cut[1])):
        verdict = compare(*pair)
        assert (verdict.same, verdict.agreed, verdict.step) == (False, 15, None)
        assert str(verdict).startswith(
            "not known to be the same: 15 rows of 2 steps agree, to the bit, and what came next"
        )
        assert str(verdict).count("is incomplete: the run was killed") == len({*pair} - {ends})
        assert main(["compare", *map(str, pair)]) == 1
    for pair in ((cut[0], tmp_path / "whole"), (tmp_path / "whole", cut[1])):
        assert not compare(*pair).same
        assert "ends before step 1: `h` cotangent, with which" in str(compare(*pair))


@pytest.mark.parametrize("damage", ["lost", "of another run"])
def test_values_that_cannot_be_told_do_not_hide_where_runs_part(tmp_path, damage):
    a = run(tmp_path / "a", WEIGHT, step=keeping)
    b = run(tmp_path / "b", 2 * WEIGHT, step=keeping)
    values = tmp_path / "b.values" / "0"
    if damage == "lost":
        values.unlink()
    else:
        values.write_bytes((tmp_path / "a.values" / "0").read_bytes())
    verdict = compare(a, b)
    assert (verdict.same, verdict.step, verdict.probe) == (False, 0, "yes")
    assert f"{b} has values kept in {values.resolve()}, which " in str(verdict)
    assert "elements differ" not in str(verdict)


def test_what_the_terminal_cannot_show_is_escaped(tmp_path, monkeypatch):
    step = recorded(lambda x: monitor(x, "größe→\x1b[2J\n\ud800"))
    xs = {"ä": X, "b": 2 * X}
    paths = [str(written(tmp_path / name, step(x)[1])) for name, x in xs.items()]
    for encoding, shown in (
        ("ascii", r"`gr\xf6\xdfe\u2192\x1b[2J\n\ud800` forward"),
        ("utf-8", r"`größe→\x1b[2J\n\ud800` forward"),
    ):
        written_to = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written_to, encoding))
        assert main(["compare", *paths]) == 1
        assert written_to.getvalue().decode(encoding).startswith(f"step 0: {shown}\n")


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
    [(KeyboardInterrupt, "Interrupted."), (MemoryError, "not enough memory for these")],
)
def test_what_stops_it_is_told_in_one_line(failure, says, monkeypatch, capsys):
    def stopped(a, b):
        raise failure

    monkeypatch.setattr("eqx_norm.determinism.__main__.compare", stopped)
    assert main(["compare", "a", "b"]) == 2
    out, err = capsys.readouterr()
    assert (out, says in err, err.count("\n")) == ("", True, 1)


NONSENSE: list[Any] = [None, True, -1, 1.5, float("nan"), "", "x", [], [[]], [-1], {}, 10**30]
# What has the right type and may be wrong.
PLAUSIBLE: dict[str, list[Any]] = {
    "step": [0, 1, -3, 10**30],
    "probe": ["h", "\x1b", "\ud800", 60_000 * "h"],
    "kind": ["forward", "tangent", "done"],
    "iteration": [[], [0], [10**30]],
    "again": [1, 2, 10**30],
    "fingerprint": [None, "0" * 16, "g" * 16],
    "shape": [[], [2, 3], [6], [7], 2 * [10**18], [0, 10**30], 70 * [1]],
    "dtype": [
        *("float64", "bool", "int4", "complex64", "key<fry>", "float6_e2m3fn", "float128"),
        *("object", "S4", "V4", "f4,f4", "(2,3)f4", "datetime64", "no such dtype"),
    ],
    "values": [None, [0, 24], [24, 24], [0, 0], [1, 7], [0, 10**30], 2 * [2**62]],
}


def forged(random, lines):
    """Returns the lines of a ledger, some of them changed, with checksums that are right."""
    lines = [*lines]
    for i in random.sample(range(len(lines)), random.randint(1, 2)):
        fields = json.loads(lines[i])
        del fields["crc"]
        field = random.choice([*fields, "another"])
        fields[field] = random.choice(random.choice([NONSENSE, PLAUSIBLE.get(field, NONSENSE)]))
        if random.random() < 0.1:
            del fields[field]
        text = json.dumps(fields)[:-1].encode()
        more = random.choice([b"[", b"9", b'{"a":', b"\xff", b"\0", b","]) * 5000
        lines[i] = sealed(random.choice([*12 * [text], text + more, more, b""]))
    return b"".join(lines)


def test_forged_ledgers_end_with_a_status_and_one_line(tmp_path, capsys):
    whole, other = run(tmp_path / "whole", WEIGHT, step=keeping), tmp_path / "other"
    shutil.copytree(f"{whole}.values", f"{other}.values")
    lines = whole.read_bytes().splitlines(keepends=True)
    found = Counter()
    for seed in range(120):
        other.write_bytes(forged(random.Random(seed), lines))
        for pair in ([other, whole], [other, other]):
            status = main(["compare", *map(str, pair)])
            found[status] += 1
            out, err = capsys.readouterr()
            assert (bool(out), err.count("\n")) == ((False, 1) if status == 2 else (True, 0))
            if status == 0:  # what is compared is all but where the values are
                assert len({tuple(r[:-1] for r in read(path).rows) for path in pair}) == 1
        with contextlib.suppress(LedgerError):
            contents = read(other)
            for row in contents.rows:
                with contextlib.suppress(LedgerError):
                    values = contents.values(row)
                    assert values is None or hexadecimal(fingerprint(values)) == row.fingerprint
    assert [*sorted(found)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (f32([1, 2]), f32([1, 2.5]), "max difference 0.5, 2097152 ulp"),
        (f32([0.0]), f32([-0.0]), "max difference 0, 0 ulp"),
        (f32([1e-45]), f32([-1e-45]), "max difference 2.8026e-45, 2 ulp"),
        (f32([np.inf, 1]), f32([1, 2]), "1 of them are not finite in one or both"),
        (f32([np.nan]), f32([1]), "1 of 1 elements differ"),
        (np.array([3, -4]), np.array([3, 4]), "max difference 8"),
        (np.array([0], np.uint64), np.array([2**64 - 1], np.uint64), f"{2**64 - 1}"),
        (np.array([True]), np.array([False]), "the first is [0]: True and False"),
        (np.array([1 + 1j], np.complex64), np.array([1 + 2j], np.complex64), "8388608 ulp"),
        (np.array([1.7e308]), np.array([-1.7e308]), "max difference inf, "),
        (np.array([1.0]), np.array([-1.0]), "max difference 2, 9214364837600034816 ulp"),
        (jnp.bfloat16(1), jnp.bfloat16(2), "the first is []: 1 and 2"),
        (jnp.bfloat16(1), jnp.bfloat16(2), "max difference 1, 128 ulp"),
    ],
    ids=map(str, range(13)),
)
def test_differences(a, b, expected):
    assert expected in "; ".join(difference(np.asarray(a), np.asarray(b)))


def test_help_teaches_and_bad_arguments_end_with_2():
    told = python("-m", "eqx_norm.determinism", "--help").stdout
    for word in ("compare", "monitor_module", "recorded(train_step", "exit status: 0"):
        assert word in told
    for arguments in ([], ["compare", "a"]):
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
    assert main(["compare", "no such file", "neither"]) == 2
