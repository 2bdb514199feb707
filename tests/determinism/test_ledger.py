"""A ledger is written step by step, survives its run, and is never written over."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm.determinism import Ledger, monitor, read, recorded
from tests.determinism.harness import X, written
from tests.helpers import bits
from tests.processes import ROOT


@pytest.fixture
def record(records):
    return records[0]


def kept_x(path):
    contents = read(path)
    return bits(contents.values(contents.rows[2]))


def test_what_is_written_is_read(tmp_path, record):
    contents = read(written(tmp_path / "a.jsonl", record, start=7))
    assert not contents.is_truncated
    assert contents.header["jax"] == jax.__version__
    assert contents.header["platform"] == "cpu"
    assert [row[:5] for row in contents.rows] == [
        (7, f"in.{name}", "forward", (), 1) for name in ("half", "key", "x")
    ]
    assert [row.shape for row in contents.rows] == [(2, 3), (), (2, 3)]
    assert [row.dtype for row in contents.rows] == ["bfloat16", "key<fry>", "float32"]
    half, key, x = map(contents.values, contents.rows)
    assert bits(half) == bits(X.astype(jnp.bfloat16))
    assert bits(key) == bits(jax.random.key_data(jax.random.key(3)))
    assert bits(x) == bits(X)


def test_steps_may_come_in_any_order_but_once(tmp_path, bare):
    with Ledger(tmp_path / "a.jsonl") as ledger:
        for step in (np.int64(2), 0, 1):
            ledger.append(step, bare)
        with pytest.raises(ValueError, match="has a step 2 already"):
            ledger.append(2, bare)
    assert [row.step for row in read(ledger.path).rows[::3]] == [0, 1, 2]
    with pytest.raises(ValueError, match="has been closed: step 3 comes too late"):
        ledger.append(3, bare)


@pytest.mark.parametrize("moved", [False, True], ids=["ledger", "values"])
def test_neither_a_ledger_nor_its_values_are_written_over(tmp_path, record, moved):
    path = written(tmp_path / "a.jsonl", record)
    values = tmp_path / "a.jsonl.values" / "0"
    before = path.read_bytes(), values.read_bytes()
    if moved:  # and its values are not
        path.rename(tmp_path / "old.jsonl")
    with pytest.raises(FileExistsError, match="there is .*a.jsonl(.values)?, and neither"):
        Ledger(path)
    assert path.exists() != moved
    path = tmp_path / "old.jsonl" if moved else path
    assert (path.read_bytes(), values.read_bytes()) == before


def test_values_are_found_beside_their_ledger(tmp_path, records, monkeypatch):
    """In another working directory, beside a like name, moved with it, and through a link."""
    monkeypatch.chdir(tmp_path)
    with Ledger("run.0") as ledger:
        (tmp_path / "there").mkdir()
        monkeypatch.chdir("there")
        ledger.append(0, records[0])
    path, other = tmp_path / "run.0", written(tmp_path / "run.1", records[1])
    assert [kept_x(path), kept_x(other)] == [bits(X), bits(2 * X)]
    moved = path.rename(tmp_path / "there" / "b.jsonl")
    Path(f"{path}.values").rename(f"{moved}.values")
    (tmp_path / "link").symlink_to(moved)
    assert kept_x(moved) == kept_x(tmp_path / "link") == bits(X)


def test_a_branch_that_was_not_taken_and_arrays_that_are_empty(tmp_path):
    def step(x, *empty):
        jax.lax.cond(x[0, 0] > 99, lambda x: monitor(x, "no"), lambda x: x, x)
        return monitor(empty, "empty")

    keys = jax.random.split(jax.random.key(0), 3)
    record = jax.jit(recorded(step, keep_values=True))(X, X[:0], keys[:0])[1]
    contents = read(written(tmp_path / "a", record))
    assert [row.fingerprint for row in contents.rows] == [None, "0" * 16, "0" * 16]
    no, *empty = map(contents.values, contents.rows)
    assert contents.rows[0].values is no is None
    assert [values.shape for values in empty if values is not None] == [(0, 3), (0, 0)]


# --- The disk is full, or fails.


@contextlib.contextmanager
def no_room_after(size):
    """Lets no file grow beyond so many bytes, for which what is done inside has to fail."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_step_that_could_not_be_written_can_be_appended_again(tmp_path, bare):
    whole = written(tmp_path / "whole", *3 * [bare])
    with Ledger(tmp_path / "a.jsonl") as ledger:
        ledger.append(0, bare)
        before = ledger.path.read_bytes()
        for room in (0, 1, len(before) // 3):
            with no_room_after(len(before) + room):
                ledger.append(1, bare)
            assert ledger.path.read_bytes() == before
        for error in (OSError(5, "Input/output error"), KeyboardInterrupt()):
            with mock.patch.object(os, "fsync", side_effect=error), pytest.raises(type(error)):
                ledger.append(1, bare)
            assert ledger.path.read_bytes() == before
        _, too_long = recorded(lambda x: monitor(x, 70_000 * "n"))(X)
        with pytest.raises(ValueError, match="65536 is the most. Give the probe 'nnnn"):
            ledger.append(1, too_long)
        # What cannot be taken back at once is taken back before the next step.
        with mock.patch.object(Ledger, "_take_back"), no_room_after(len(before) + 9):
            ledger.append(1, bare)
        assert read(ledger.path).is_truncated
        ledger.append(1, bare)
        ledger.append(2, bare)
    assert ledger.path.read_bytes() == whole.read_bytes()


def test_values_that_did_not_fit_on_the_disk_can_be_kept_again(tmp_path, record):
    with Ledger(tmp_path / "a.jsonl") as ledger:
        size = len(ledger.path.read_bytes())
        with no_room_after(40):
            ledger.append(0, record)  # its values are 44 bytes
        assert len(ledger.path.read_bytes()) == size
        assert not [*(tmp_path / "a.jsonl.values").iterdir()]
        # The values are there, and the disk has no room for the rows.
        with no_room_after(size + 99):
            ledger.append(0, record)
        ledger.append(0, record)
    assert kept_x(ledger.path) == bits(X)


def test_a_ledger_without_a_first_line_is_not_left_behind(tmp_path):
    with no_room_after(10):
        Ledger(tmp_path / "a.jsonl")
    assert not [*tmp_path.iterdir()]
    Ledger(tmp_path / "a.jsonl").close()


def test_append_returns_when_all_is_on_the_disk(tmp_path, record, monkeypatch):
    """Nothing is written after the last `fsync` of its file, nor named before it is there."""
    synced: dict[str, Any] = {}

    def fsync(descriptor):
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.is_dir():
            synced[path.name] = sorted(p.name for p in path.iterdir())
        else:
            synced[path.name] = path.read_bytes()
            if path.name == "a.jsonl" and b'"step":0' in path.read_bytes():
                assert synced["a.jsonl.values"] == ["0"]

    monkeypatch.setattr(os, "fsync", fsync)
    ledger = Ledger(tmp_path / "a.jsonl")
    assert synced["a.jsonl"] == ledger.path.read_bytes()
    assert synced[tmp_path.name] == ["a.jsonl"]
    ledger.append(0, record)
    assert synced["a.jsonl"] == ledger.path.read_bytes()
    assert synced[tmp_path.name] == ["a.jsonl", "a.jsonl.values"]
    assert synced["0.unfinished"] == (tmp_path / "a.jsonl.values" / "0").read_bytes()
    ledger.close()


# --- The run is killed.

RUN = """
import sys, jax, jax.numpy as jnp
from eqx_norm.determinism import Ledger, monitor, recorded, recorded_into
def step(x):
    return monitor(jnp.sin(monitor(x, "x")), "y")
ledger, x = Ledger(sys.argv[1]), jnp.ones(3)
returned, called_back = jax.jit(recorded(step)), jax.jit(recorded_into(ledger, step))
for i in range(10**9):
    if sys.argv[2] == "returned":
        x, record = returned(x)
        ledger.append(i, record)
    else:
        x = called_back(i, x)
    print(i, flush=True)
"""


@pytest.mark.parametrize("transport", ["returned", "called back"])
def test_a_run_that_is_killed_leaves_its_steps(tmp_path, transport):
    path = tmp_path / "killed.jsonl"
    run = subprocess.Popen(
        [sys.executable, "-c", RUN, str(path), transport],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert run.stdout
    printed = [run.stdout.readline() for _ in range(20)]
    run.send_signal(signal.SIGKILL)
    # The last line may have been cut.
    printed += run.stdout.read().splitlines()[:-1]
    run.stdout.close()
    assert run.wait() == -signal.SIGKILL
    left = read(path).rows
    assert [row.probe for row in left] == (["x", "y"] * len(left))[: len(left)]
    assert [row.step for row in left[::2]] == [*range(len(left[::2]))]
    if transport == "returned":
        # Whatever it said to have appended is there.
        assert len(left) // 2 > int(printed[-1])
    else:
        assert len(left) > 20
