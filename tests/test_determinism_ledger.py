"""A ledger survives the death of its run, and says so where it is damaged."""

import json
import os
import re
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

from eqx_norm.determinism import Ledger, LedgerError, compare, monitor, read, recorded

from .helpers import bits, normal

ROOT = Path(__file__).parents[1]
X = normal(0, (2, 3))


def tree(x):
    return monitor({"x": x, "half": x.astype(jnp.bfloat16), "key": jax.random.key(3)}, "in")


@pytest.fixture(scope="module")
def record():
    return jax.jit(recorded(tree, keep_values=True))(X)[1]


@pytest.fixture(scope="module")
def bare(record):
    return jax.jit(recorded(tree))(X)[1]


@pytest.fixture
def ledger(tmp_path, bare):
    with Ledger(tmp_path / "a.jsonl") as ledger:
        for step in range(3):
            ledger.append(step, bare)
    return ledger.path


def test_what_is_written_is_read(tmp_path, record):
    with Ledger(tmp_path / "a.jsonl") as ledger:
        ledger.append(7, record)
    contents = read(ledger.path)
    assert not contents.is_truncated
    assert contents.header["jax"] == jax.__version__
    assert contents.header["platform"] == "cpu"
    assert [(row.step, row.probe, row.kind) for row in contents.rows] == [
        (7, "in.half", "forward"),
        (7, "in.key", "forward"),
        (7, "in.x", "forward"),
    ]
    assert [row.shape for row in contents.rows] == [(2, 3), (), (2, 3)]
    assert [row.dtype for row in contents.rows] == ["bfloat16", "key<fry>", "float32"]
    half, key, x = map(contents.values, contents.rows)
    assert bits(half) == bits(X.astype(jnp.bfloat16))
    assert bits(key) == bits(jax.random.key_data(jax.random.key(3)))
    assert bits(x) == bits(X)


def test_each_line_is_json_with_a_checksum(ledger):
    for line in ledger.read_bytes().splitlines():
        text, checksum = line.rsplit(b',"crc":', 1)
        assert json.loads(line)["crc"] == f"{zlib.crc32(text):08x}"
        assert re.fullmatch(b'"[0-9a-f]{8}"}', checksum)


def test_steps_may_come_in_any_order_but_once(tmp_path, bare):
    with Ledger(tmp_path / "a.jsonl") as ledger:
        for step in (2, 0, 1):
            ledger.append(step, bare)
        with pytest.raises(ValueError, match="has a step 2 already"):
            ledger.append(2, bare)
    assert [row.step for row in read(ledger.path).rows[::3]] == [0, 1, 2]
    with pytest.raises(ValueError, match="has been closed: step 3 comes too late"):
        ledger.append(3, bare)


def test_a_ledger_is_never_written_over(ledger):
    before = ledger.read_bytes()
    with pytest.raises(FileExistsError, match="not written over"):
        Ledger(ledger)
    assert ledger.read_bytes() == before


def test_cut_anywhere_it_is_a_readable_prefix(ledger, tmp_path):
    content, whole = ledger.read_bytes(), read(ledger)
    header = content.index(b"\n") + 1
    cut = tmp_path / "cut.jsonl"
    for size in range(len(content)):
        cut.write_bytes(content[:size])
        if size < header:
            with pytest.raises(LedgerError, match="no ledger, or one of a run that was killed"):
                read(cut)
            continue
        part = read(cut)
        complete = content[:size].count(b"\n") - 1
        assert part.rows == whole.rows[:complete]
        assert part.is_truncated == (content[size - 1 : size] != b"\n")


def test_any_changed_byte_is_noticed(ledger):
    content, whole = ledger.read_bytes(), read(ledger)
    for place in [*range(0, len(content), 3), len(content) - 1]:
        changed = bytearray(content)
        changed[place] ^= 1
        ledger.write_bytes(changed)
        if place == len(content) - 1:
            # The last line without its end is one that was not finished.
            assert read(ledger) == (ledger, whole.header, whole.rows[:-1], True)
        else:
            with pytest.raises(LedgerError, match="is damaged|is no ledger"):
                read(ledger)


def test_a_damaged_line_is_named(ledger):
    lines = ledger.read_bytes().splitlines(keepends=True)
    lines[4] = lines[4].replace(b'"step":1', b'"step":2')
    ledger.write_bytes(b"".join(lines))
    with pytest.raises(LedgerError, match="checksum of line 5"):
        read(ledger)


def rewritten(path, **fields):
    """With another header, whose checksum is right."""
    first, *rest = path.read_bytes().splitlines(keepends=True)
    header = {**json.loads(first), **fields}
    del header["crc"]
    text = json.dumps(header)[:-1].encode()
    crc = f',"crc":"{zlib.crc32(text):08x}"}}\n'.encode()
    path.write_bytes(text + crc + b"".join(rest))


def test_other_files_and_versions_are_refused(ledger, tmp_path):
    with pytest.raises(LedgerError, match="cannot be read \\(No such file"):
        read(tmp_path / "nothing")
    with pytest.raises(LedgerError, match="cannot be read \\(Is a directory"):
        read(tmp_path)
    other = tmp_path / "other"
    other.write_bytes(bytes(range(256)) * 9)
    with pytest.raises(LedgerError, match="its first line is not that of one"):
        read(other)
    rewritten(ledger, version=2)
    with pytest.raises(LedgerError, match="of version 2, and this eqx_norm reads version 1"):
        read(ledger)


def test_a_step_that_is_there_twice_is_refused(ledger):
    header, *rows = ledger.read_bytes().splitlines(keepends=True)
    ledger.write_bytes(header + b"".join(rows + rows))
    with pytest.raises(LedgerError, match="has the step 0 twice"):
        read(ledger)


def test_lost_values_are_told(tmp_path, record):
    with Ledger(tmp_path / "a.jsonl") as ledger:
        ledger.append(0, record)
    (tmp_path / "a.jsonl.values" / "0.npz").unlink()
    contents = read(ledger.path)
    with pytest.raises(LedgerError, match="names the values in a.jsonl.values/0.npz, which"):
        contents.values(contents.rows[0])


@pytest.mark.parametrize("damage", ["cut", "flip", "none of it"])
def test_damaged_values_are_told(tmp_path, record, damage):
    with Ledger(tmp_path / "a.jsonl") as ledger:
        ledger.append(0, record)
    file = tmp_path / "a.jsonl.values" / "0.npz"
    content = file.read_bytes()
    at = content.index(np.asarray(X).tobytes())
    flipped = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
    file.write_bytes({"cut": content[:-9], "flip": flipped, "none of it": b""}[damage])
    contents = read(ledger.path)
    with pytest.raises(LedgerError, match="0.npz, which cannot be read"):
        contents.values(contents.rows[2])


def test_ledgers_of_like_names_keep_their_values_apart(tmp_path, record):
    other = jax.jit(recorded(tree, keep_values=True))(2 * X)[1]
    for name, given in (("run.0", record), ("run.1", other)):
        with Ledger(tmp_path / name) as ledger:
            ledger.append(0, given)
    for name, x in (("run.0", X), ("run.1", 2 * X)):
        contents = read(tmp_path / name)
        assert bits(contents.values(contents.rows[2])) == bits(x)


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
                assert synced["a.jsonl.values"] == ["0.npz"]

    monkeypatch.setattr(os, "fsync", fsync)
    ledger = Ledger(tmp_path / "a.jsonl")
    assert synced["a.jsonl"] == ledger.path.read_bytes()
    assert synced[tmp_path.name] == ["a.jsonl"]
    ledger.append(0, record)
    assert synced["a.jsonl"] == ledger.path.read_bytes()
    assert synced[tmp_path.name] == ["a.jsonl", "a.jsonl.values"]
    assert synced["0.unfinished"] == (tmp_path / "a.jsonl.values" / "0.npz").read_bytes()
    ledger.close()


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
    rows = read(path).rows
    assert [row.probe for row in rows] == (["x", "y"] * len(rows))[: len(rows)]
    assert [row.step for row in rows[::2]] == [*range(len(rows[::2]))]
    if transport == "returned":
        # Whatever it said to have appended is there.
        assert len(rows) // 2 > int(printed[-1])
    else:
        assert len(rows) > 20


def test_a_killed_run_is_compared_as_far_as_it_went(ledger, tmp_path):
    shorter = tmp_path / "shorter.jsonl"
    content = ledger.read_bytes()
    shorter.write_bytes(content[:-200])
    for pair in ((ledger, shorter), (shorter, ledger)):
        verdict = compare(*pair)
        assert not verdict.same
        assert verdict.step is None
        assert verdict.agreed == 7
        assert f"{shorter} ends before step 2: `in.key` forward" in str(verdict)
        assert f"{shorter} is incomplete: the run was killed" in str(verdict)


def test_another_version_of_jax_is_told(ledger, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_bytes(ledger.read_bytes())
    rewritten(other, jax="0.0.1")
    verdict = compare(ledger, other)
    assert verdict.same
    assert f"written with different jax: {jax.__version__} and 0.0.1" in str(verdict)


def test_empty_arrays_are_there(tmp_path):
    _, record = jax.jit(recorded(lambda x: monitor(x, "empty"), keep_values=True))(X[:0])
    with Ledger(tmp_path / "a") as ledger:
        ledger.append(np.int64(0), record)
    (row,) = read(ledger.path).rows
    assert row.fingerprint == "0" * 16
    assert read(ledger.path).values(row).shape == (0, 3)  # type: ignore
