"""A ledger is written step by step, survives its run, and is never written over."""

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm.determinism import Ledger, monitor, read, recorded
from tests.determinism.harness import ROOT, written
from tests.helpers import bits, normal

X = normal(0, (2, 3))


def tree(x):
    return monitor({"x": x, "half": x.astype(jnp.bfloat16), "key": jax.random.key(3)}, "in")


@pytest.fixture(scope="module")
def record():
    return jax.jit(recorded(tree, keep_values=True))(X)[1]


@pytest.fixture(scope="module")
def bare(record):
    return jax.jit(recorded(tree))(X)[1]


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


def test_each_line_is_json_with_a_checksum(tmp_path, bare):
    for line in written(tmp_path / "a", bare).read_bytes().splitlines():
        text, checksum = line.rsplit(b',"crc":', 1)
        assert json.loads(line)["crc"] == f"{zlib.crc32(text):08x}"
        assert re.fullmatch(b'"[0-9a-f]{8}"}', checksum)


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


def test_a_ledger_and_its_values_may_move_together(tmp_path, record):
    path = written(tmp_path / "a.jsonl", record)
    (tmp_path / "there").mkdir()
    moved = path.rename(tmp_path / "there" / "b.jsonl")
    Path(f"{path}.values").rename(f"{moved}.values")
    (tmp_path / "link").symlink_to(moved)
    assert kept_x(moved) == kept_x(tmp_path / "link") == bits(X)


def test_values_are_where_the_ledger_is_whatever_the_working_directory(
    tmp_path, record, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with Ledger("a.jsonl") as ledger:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        ledger.append(0, record)
    assert kept_x(tmp_path / "a.jsonl") == bits(X)


def test_ledgers_of_like_names_keep_their_values_apart(tmp_path, record):
    other = jax.jit(recorded(tree, keep_values=True))(2 * X)[1]
    paths = written(tmp_path / "run.0", record), written(tmp_path / "run.1", other)
    assert [*map(kept_x, paths)] == [bits(X), bits(2 * X)]


def test_of_a_branch_that_was_not_taken_there_are_no_values(tmp_path):
    def branches(x):
        return jax.lax.cond(x[0, 0] > 99, lambda x: monitor(x, "no"), lambda x: x, x)

    record = jax.jit(recorded(branches, keep_values=True))(X)[1]
    contents = read(written(tmp_path / "a", record))
    (row,) = contents.rows
    assert (row.fingerprint, row.values, contents.values(row)) == (None, None, None)


def test_empty_arrays_are_there(tmp_path):
    keys = jax.random.split(jax.random.key(0), 3)[:0]
    both = jax.jit(recorded(lambda *xs: monitor(xs, "empty"), keep_values=True))
    contents = read(written(tmp_path / "a", both(X[:0], keys)[1]))
    assert [row.fingerprint for row in contents.rows] == ["0" * 16] * 2
    assert [contents.values(row).shape for row in contents.rows] == [(0, 3), (0, 0)]  # type: ignore


# --- The disk is full, or fails.


@contextlib.contextmanager
def full_after(size):
    """Lets no file grow beyond so many bytes, and gives the error that is due."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield pytest.raises(OSError, match="too large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_step_that_did_not_fit_on_the_disk_can_be_appended_again(tmp_path, bare):
    whole = written(tmp_path / "whole", *3 * [bare])
    with Ledger(tmp_path / "a.jsonl") as ledger:
        ledger.append(0, bare)
        before = ledger.path.read_bytes()
        for more in (0, 1, len(before) // 3):
            with full_after(len(before) + more) as fails, fails:
                ledger.append(1, bare)
            assert ledger.path.read_bytes() == before
        ledger.append(1, bare)
        ledger.append(2, bare)
    assert ledger.path.read_bytes() == whole.read_bytes()


def test_what_could_not_be_taken_back_at_once_is_before_the_next_step(
    tmp_path, bare, monkeypatch
):
    whole = written(tmp_path / "whole", *3 * [bare])
    with Ledger(tmp_path / "a.jsonl") as ledger:
        ledger.append(0, bare)
        with monkeypatch.context() as patch:
            patch.setattr(Ledger, "_take_back", lambda self: None)
            with full_after(ledger.path.stat().st_size + 9) as fails, fails:
                ledger.append(1, bare)
        assert read(ledger.path).is_truncated
        ledger.append(1, bare)
        ledger.append(2, bare)
    assert ledger.path.read_bytes() == whole.read_bytes()


def test_values_that_did_not_fit_on_the_disk_can_be_kept_again(tmp_path, record):
    with Ledger(tmp_path / "a.jsonl") as ledger:
        size = len(ledger.path.read_bytes())
        with full_after(40) as fails, fails:
            ledger.append(0, record)  # its values are 44 bytes
        assert len(ledger.path.read_bytes()) == size
        assert not [*(tmp_path / "a.jsonl.values").iterdir()]
        # The values are there, and the disk has no room for the rows.
        with full_after(size + 99) as fails, fails:
            ledger.append(0, record)
        ledger.append(0, record)
    assert kept_x(ledger.path) == bits(X)


def test_a_ledger_without_a_first_line_is_not_left_behind(tmp_path):
    with full_after(10) as fails, fails:
        Ledger(tmp_path / "a.jsonl")
    assert not [*tmp_path.iterdir()]
    Ledger(tmp_path / "a.jsonl").close()


@pytest.mark.parametrize(
    "interruption", [OSError(5, "Input/output error"), KeyboardInterrupt()]
)
def test_what_fails_before_it_is_on_the_disk_is_taken_back(
    tmp_path, bare, monkeypatch, interruption
):
    def fsync(descriptor):
        raise interruption

    with Ledger(tmp_path / "a.jsonl") as ledger:
        before = ledger.path.read_bytes()
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fsync)
            with pytest.raises(type(interruption)):
                ledger.append(0, bare)
            assert ledger.path.read_bytes() == before
        ledger.append(0, bare)
    assert [row.step for row in read(ledger.path).rows] == [0] * 3


def test_a_row_that_could_not_be_read_again_is_not_written(tmp_path, bare):
    with Ledger(tmp_path / "a.jsonl") as ledger:
        _, record = recorded(lambda x: monitor(x, 70_000 * "n"))(X)
        with pytest.raises(ValueError, match="65536 is the most. Give the probe 'nnnn"):
            ledger.append(0, record)
        ledger.append(0, bare)
    assert len(read(ledger.path).rows) == 3


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
