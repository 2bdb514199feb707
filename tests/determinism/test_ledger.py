"""A ledger survives the death of its run, and says so where it is damaged."""

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

from eqx_norm.determinism import Ledger, LedgerError, _ledger, compare, monitor, read, recorded

from ..helpers import bits, normal

ROOT = Path(__file__).parents[2]
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
    with pytest.raises(FileExistsError, match="there is .*a.jsonl, and neither"):
        Ledger(ledger)
    assert ledger.read_bytes() == before


def test_cut_anywhere_it_is_a_readable_prefix(ledger, tmp_path):
    content, whole = ledger.read_bytes(), read(ledger)
    header = content.index(b"\n") + 1
    cut = tmp_path / "cut.jsonl"
    ends = [i + 1 for i, byte in enumerate(content) if byte == ord("\n")]
    for size in sorted({*range(0, len(content), 9), *(e - 1 for e in ends), *ends[:-1]}):
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
    for place in [*range(0, len(content), 9), len(content) - 1]:
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
    rewritten(ledger, version=1)
    with pytest.raises(LedgerError, match="of version 1, and this eqx_norm reads version 2"):
        read(ledger)
    rewritten(ledger, version=2, device=None)
    with pytest.raises(LedgerError, match="its first line tells of no device"):
        read(ledger)


def test_a_step_that_is_there_twice_is_refused(ledger):
    header, *rows = ledger.read_bytes().splitlines(keepends=True)
    ledger.write_bytes(header + b"".join(rows + rows))
    with pytest.raises(LedgerError, match="has the step 0 twice"):
        read(ledger)


def test_two_ledgers_in_one_file_are_refused(ledger):
    ledger.write_bytes(2 * ledger.read_bytes())
    with pytest.raises(LedgerError, match="has a second ledger from line 11 on"):
        read(ledger)


@pytest.fixture
def kept(tmp_path, record):
    with Ledger(tmp_path / "a.jsonl") as ledger:
        ledger.append(0, record)
        ledger.append(1, doubled(record))
    return ledger.path


def doubled(record):
    return jax.jit(recorded(tree, keep_values=True))(2 * X)[1]


def test_lost_values_are_told(kept):
    (kept.parent / "a.jsonl.values" / "0").unlink()
    contents = read(kept)
    with pytest.raises(LedgerError, match="values kept in .*a.jsonl.values/0, which cannot"):
        contents.values(contents.rows[0])


@pytest.mark.parametrize("damage", ["cut", "flip", "none of it", "another step's"])
def test_damaged_values_are_told(kept, damage):
    file, other = (kept.parent / "a.jsonl.values" / step for step in "01")
    content = file.read_bytes()
    at = content.index(np.asarray(X).tobytes())
    flipped = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
    damaged, says = {
        "cut": (content[:-9], "which cannot be read \\(it is too short\\)"),
        "flip": (flipped, "not those that step 0: `in.x` forward saw: their fingerprint is"),
        "none of it": (b"", "too short"),
        "another step's": (other.read_bytes(), "They are damaged, or another run's"),
    }[damage]
    file.write_bytes(damaged)
    contents = read(kept)
    with pytest.raises(LedgerError, match=says):
        contents.values(contents.rows[2])


def test_values_are_read_from_the_ledger_s_own_folder_alone(kept):
    """A row says where in its step's file they are, and has no way to name another; nor does
    a link lead to one."""
    contents, folder = read(kept), kept.parent / "a.jsonl.values"
    file = folder / "0"
    file.rename(kept.parent / "elsewhere")
    file.symlink_to(kept.parent / "elsewhere")
    with pytest.raises(LedgerError, match="cannot be read \\(Too many levels of symbolic"):
        contents.values(contents.rows[0])
    file.unlink()
    (kept.parent / "elsewhere").rename(file)
    assert contents.values(contents.rows[0]) is not None
    folder.rename(kept.parent / "folder")
    folder.symlink_to(kept.parent / "folder")
    with pytest.raises(LedgerError, match="cannot be read \\(its folder is a link"):
        contents.values(contents.rows[0])


def test_a_pipe_among_the_values_is_not_waited_for(kept):
    file = kept.parent / "a.jsonl.values" / "0"
    file.unlink()
    os.mkfifo(file)
    contents = read(kept)
    with pytest.raises(LedgerError, match="it is no regular file"):
        contents.values(contents.rows[0])


def test_a_ledger_and_its_values_may_move_together(kept, tmp_path):
    (tmp_path / "there").mkdir()
    moved = kept.rename(tmp_path / "there" / "b.jsonl")
    Path(f"{kept}.values").rename(f"{moved}.values")
    (tmp_path / "link").symlink_to(moved)
    for path in (moved, tmp_path / "link"):
        contents = read(path)
        assert bits(contents.values(contents.rows[2])) == bits(X)


def test_values_are_never_written_over(kept, record):
    """The ledger has been moved, and its values have not."""
    kept.rename(kept.parent / "old.jsonl")
    before = (kept.parent / "a.jsonl.values" / "0").read_bytes()
    with pytest.raises(FileExistsError, match="there is .*a.jsonl.values, and neither"):
        Ledger(kept)
    assert not kept.exists()
    assert (kept.parent / "a.jsonl.values" / "0").read_bytes() == before


def test_values_are_where_the_ledger_is_whatever_the_working_directory(
    tmp_path, record, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with Ledger("a.jsonl") as ledger:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        ledger.append(0, record)
    contents = read(tmp_path / "a.jsonl")
    assert bits(contents.values(contents.rows[2])) == bits(X)


def test_of_a_branch_that_was_not_taken_there_are_no_values(tmp_path):
    def branches(x):
        return jax.lax.cond(x[0, 0] > 99, lambda x: monitor(x, "no"), lambda x: x, x)

    with Ledger(tmp_path / "a") as ledger:
        ledger.append(0, jax.jit(recorded(branches, keep_values=True))(X)[1])
    contents = read(ledger.path)
    (row,) = contents.rows
    assert (row.fingerprint, row.values, contents.values(row)) == (None, None, None)


@contextlib.contextmanager
def full_after(size):
    """No file can grow beyond so many bytes; what is written to it until there, is."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_step_that_did_not_fit_on_the_disk_can_be_appended_again(tmp_path, record, bare):
    with Ledger(tmp_path / "whole") as whole:
        for step in range(3):
            whole.append(step, bare)
    with Ledger(tmp_path / "a.jsonl") as ledger:
        ledger.append(0, bare)
        before = ledger.path.read_bytes()
        for more in (0, 1, len(before) // 3):
            with full_after(len(before) + more), pytest.raises(OSError, match="too large"):
                ledger.append(1, bare)
            assert ledger.path.read_bytes() == before
        ledger.append(1, bare)
        ledger.append(2, bare)
    assert ledger.path.read_bytes() == whole.path.read_bytes()


def test_what_could_not_be_taken_back_at_once_is_before_the_next_step(
    tmp_path, bare, ledger, monkeypatch
):
    with Ledger(tmp_path / "b.jsonl") as other:
        other.append(0, bare)
        with monkeypatch.context() as patch, full_after(other.path.stat().st_size + 9):
            patch.setattr(Ledger, "_take_back", lambda self: None)
            with pytest.raises(OSError, match="too large"):
                other.append(1, bare)
        assert read(other.path).is_truncated
        other.append(1, bare)
        other.append(2, bare)
    assert other.path.read_bytes() == ledger.read_bytes()


def test_values_that_did_not_fit_on_the_disk_can_be_kept_again(tmp_path, record, monkeypatch):
    with Ledger(tmp_path / "a.jsonl") as ledger:
        size = len(ledger.path.read_bytes())
        with full_after(40), pytest.raises(OSError, match="too large"):
            ledger.append(0, record)  # its values are 44 bytes
        assert len(ledger.path.read_bytes()) == size
        assert not [*(tmp_path / "a.jsonl.values").iterdir()]
        # The values are there, and the disk has no room for the rows.
        with full_after(size + 99), pytest.raises(OSError, match="too large"):
            ledger.append(0, record)
        ledger.append(0, record)
    contents = read(ledger.path)
    assert bits(contents.values(contents.rows[2])) == bits(X)


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


def test_a_ledger_without_a_first_line_is_not_left_behind(tmp_path):
    with full_after(10), pytest.raises(OSError, match="too large"):
        Ledger(tmp_path / "a.jsonl")
    assert not [*tmp_path.iterdir()]
    Ledger(tmp_path / "a.jsonl").close()


def test_a_row_that_could_not_be_read_again_is_not_written(tmp_path, bare):
    with Ledger(tmp_path / "a.jsonl") as ledger:
        _, record = recorded(lambda x: monitor(x, 70_000 * "n"))(X)
        with pytest.raises(ValueError, match="65536 is the most. Give the probe 'nnnn"):
            ledger.append(0, record)
        ledger.append(0, bare)
    assert len(read(ledger.path).rows) == 3


def test_what_is_no_regular_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero", "/dev/null"):
        with pytest.raises(LedgerError, match="cannot be read \\(it is no regular file"):
            read(path)


def test_reading_has_bounds(ledger):
    content = ledger.read_bytes()
    os.truncate(ledger, 2**32)  # with holes
    with pytest.raises(LedgerError, match="has a line of more than 65536 bytes"):
        read(ledger)
    os.truncate(ledger, 2**32 + 1)
    with pytest.raises(LedgerError, match="4294967297 bytes, and a ledger that is read has"):
        read(ledger)
    ledger.write_bytes(content)
    # A run that goes on writing is read as far as it was.
    lines = _ledger._lines(ledger)
    first = next(lines)
    with open(ledger, "ab") as more:
        more.write(content)
    assert b"".join([first, *lines]) == content


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
    keys = jax.random.split(jax.random.key(0), 3)[:0]
    both = jax.jit(recorded(lambda *xs: monitor(xs, "empty"), keep_values=True))
    with Ledger(tmp_path / "a") as ledger:
        ledger.append(np.int64(0), both(X[:0], keys)[1])
    contents = read(ledger.path)
    assert [row.fingerprint for row in contents.rows] == ["0" * 16] * 2
    assert [contents.values(row).shape for row in contents.rows] == [(0, 3), (0, 0)]  # type: ignore
