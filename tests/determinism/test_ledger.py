"""A ledger is written step by step, survives its run, and tells if it was damaged."""

import contextlib
import os
import resource
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm.determinism import Ledger, LedgerError, _ledger, monitor, read, recorded
from tests.determinism.harness import X, forge, written
from tests.helpers import bits


def step(x):
    return monitor({"x": x, "half": x.astype(jnp.bfloat16), "key": jax.random.key(3)}, "in")


@pytest.fixture(scope="module")
def bare():
    """Returns a record without values, of the rows `in.half`, `in.key` and `in.x`."""
    return jax.jit(recorded(step))(X)[1]


@pytest.fixture(scope="module")
def records():
    """Returns two records with values, those of `X` and of `2 * X`."""
    keeping = jax.jit(recorded(step, keep_values=True))
    return [keeping(x)[1] for x in (X, 2 * X)]


def kept_x(path):
    contents = read(path)
    return bits(contents.values(contents.rows[2]))


def test_what_is_written_is_read(tmp_path, records):
    contents = read(written(tmp_path / "a.jsonl", records[0], start=7))
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


def test_steps_may_come_in_any_order_but_once(tmp_path, bare):
    with Ledger(tmp_path / "a.jsonl") as ledger:
        for step in (np.int64(2), 0, 1):
            ledger.append(step, bare)
        with pytest.raises(ValueError, match="has a step 2 already"):
            ledger.append(2, bare)
    assert [row.step for row in read(ledger.path).rows[::3]] == [0, 1, 2]
    with pytest.raises(ValueError, match="has been closed: step 3 comes too late"):
        ledger.append(3, bare)


def test_neither_a_ledger_nor_its_values_are_written_over(tmp_path, records):
    path = written(tmp_path / "a.jsonl", records[0])
    before = path.read_bytes()
    with pytest.raises(FileExistsError, match="there is .*a.jsonl, and neither"):
        Ledger(path)
    assert path.read_bytes() == before
    path.rename(tmp_path / "old.jsonl")  # and not its values
    with pytest.raises(FileExistsError, match="there is .*a.jsonl.values, and neither"):
        Ledger(path)
    assert not path.exists()


def test_values_are_found_beside_their_ledger(tmp_path, records, monkeypatch):
    """In another working directory, moved with it, and through a link."""
    monkeypatch.chdir(tmp_path)
    with Ledger("a") as ledger:
        (tmp_path / "there").mkdir()
        monkeypatch.chdir("there")
        ledger.append(0, records[0])
    assert kept_x(tmp_path / "a") == bits(X)
    for name in ("a", "a.values"):
        (tmp_path / name).rename(tmp_path / "there" / name)
    (tmp_path / "link").symlink_to(tmp_path / "there" / "a")
    assert kept_x(tmp_path / "there" / "a") == kept_x(tmp_path / "link") == bits(X)


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


def test_values_that_did_not_fit_on_the_disk_can_be_kept_again(tmp_path, records):
    with Ledger(tmp_path / "a.jsonl") as ledger:
        size = len(ledger.path.read_bytes())
        with no_room_after(40):
            ledger.append(0, records[0])  # its values are 44 bytes
        assert len(ledger.path.read_bytes()) == size
        assert not [*(tmp_path / "a.jsonl.values").iterdir()]
        # The values are there, and the disk has no room for the rows.
        with no_room_after(size + 99):
            ledger.append(0, records[0])
        ledger.append(0, records[0])
    assert kept_x(ledger.path) == bits(X)


def test_a_ledger_without_a_first_line_is_not_left_behind(tmp_path):
    with no_room_after(10):
        Ledger(tmp_path / "a.jsonl")
    assert not [*tmp_path.iterdir()]


def test_append_returns_when_all_is_on_the_disk(tmp_path, records, monkeypatch):
    """Nothing is written after the last `fsync` of its file, nor named before it is there."""
    synced = {}

    def fsync(descriptor):
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.is_dir():
            synced[path.name] = sorted(p.name for p in path.iterdir())
        else:
            synced[path.name] = path.read_bytes()
            if path.name == "a.jsonl" and b'"step":0' in path.read_bytes():
                assert synced["a.jsonl.values"] == ["0"]

    monkeypatch.setattr(os, "fsync", fsync)
    with Ledger(tmp_path / "a.jsonl") as ledger:
        assert synced["a.jsonl"] == ledger.path.read_bytes()
        assert synced[tmp_path.name] == ["a.jsonl"]
        ledger.append(0, records[0])
        assert synced["a.jsonl"] == ledger.path.read_bytes()
        assert synced[tmp_path.name] == ["a.jsonl", "a.jsonl.values"]
        assert synced["0"] == (tmp_path / "a.jsonl.values" / "0").read_bytes()


# --- It is cut, damaged, or none.


@pytest.fixture
def ledger(tmp_path, bare):
    return written(tmp_path / "a.jsonl", *3 * [bare])


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
    for place in range(0, len(content) - 1, 9):
        changed = bytearray(content)
        changed[place] ^= 1
        ledger.write_bytes(changed)
        line = 1 + content[:place].count(b"\n")
        says = f"is damaged: the checksum of line {line} is not" if line > 1 else "is no ledger"
        with pytest.raises(LedgerError, match=says):
            read(ledger)
    # The last line without its end is one that was not finished.
    ledger.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert read(ledger) == (ledger, whole.header, whole.rows[:-1], True)


def a_step_twice(path):
    header, *rows = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(header + b"".join(rows + rows))


def a_pipe(path):
    path.unlink()
    os.mkfifo(path)


def a_link_to(target):
    def link(path):
        path.unlink()
        path.symlink_to(target)

    return link


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (a_step_twice, "has the step 0 twice"),
        (lambda path: path.write_bytes(2 * path.read_bytes()), "second ledger from line 11 on"),
        (lambda path: path.unlink(), "cannot be read \\(No such file"),
        (a_link_to("."), "cannot be read \\(Is a directory"),
        (lambda path: path.write_bytes(bytes(range(256)) * 9), "first line is not that of one"),
        (lambda path: forge(path, 0, version=1), "of version 1, and this .* version 2"),
        (lambda path: forge(path, 0, device=None), "its first line tells of no device"),
        (a_pipe, "cannot be read \\(it is no regular file"),
        (a_link_to("/dev/zero"), "cannot be read \\(it is no regular file"),
        # With holes.
        (lambda path: os.truncate(path, 2**32), "has a line of more than 65536 bytes"),
        (lambda path: os.truncate(path, 2**32 + 1), "4294967297 bytes, and a ledger that is"),
    ],
)
def test_damaged_ledgers_and_other_files_are_refused(ledger, damage, says):
    damage(ledger)
    with pytest.raises(LedgerError, match=says):
        read(ledger)


@pytest.mark.parametrize(
    "field",
    [
        {"step": "0"},
        {"probe": ""},
        {"kind": "done"},
        {"iteration": [-1]},
        {"again": True},
        {"fingerprint": "g" * 16},
        {"shape": [1.5]},
        {"dtype": None},
        {"values": [0]},
        {"values": [[0, 0]]},
        {"another": 0},
    ],
)
def test_a_right_checksum_is_not_enough(ledger, field):
    forge(ledger, 2, **field)
    with pytest.raises(LedgerError, match="is damaged: line 3 is not that of a probe"):
        read(ledger)


@pytest.mark.parametrize(
    "field", [{"shape": 2 * [10**18]}, {"dtype": "object"}, {"values": [0, 10**30]}]
)
def test_nor_is_a_right_row_for_values(tmp_path, records, field):
    path = written(tmp_path / "a.jsonl", records[0])
    forge(path, 3, **field)
    contents = read(path)
    with pytest.raises(LedgerError, match="has values kept in .*, which cannot be read"):
        contents.values(contents.rows[-1])


def test_a_run_that_goes_on_writing_is_read_as_far_as_it_was(ledger):
    content = ledger.read_bytes()
    lines = _ledger._lines(ledger)
    first = next(lines)
    with open(ledger, "ab") as more:
        more.write(content)
    assert b"".join([first, *lines]) == content


def flipped(file):
    content = file.read_bytes()
    at = content.index(np.asarray(X).tobytes())
    file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])


def a_link_elsewhere(path):
    path.symlink_to(path.rename(path.with_name("elsewhere")))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda file: file.unlink(), "values kept in .*a.jsonl.values/0, which cannot"),
        (lambda file: os.truncate(file, 35), "which cannot be read \\(it is too short\\)"),
        (flipped, "not those that step 0: `in.x` forward saw: their fingerprint is"),
        (
            lambda file: file.write_bytes((file.parent / "1").read_bytes()),
            "They are damaged, or another run's",
        ),
        (a_pipe, "it is no regular file"),
        # A row says where in its step's file its values are, and has no way to name another;
        # nor does a link lead to one.
        (a_link_elsewhere, "cannot be read \\(Too many levels of symbolic"),
        (lambda file: a_link_elsewhere(file.parent), "cannot be read \\(its folder is a link"),
    ],
)
def test_damaged_values_are_told(tmp_path, records, damage, says):
    contents = read(written(tmp_path / "a.jsonl", *records))
    assert bits(contents.values(contents.rows[2])) == bits(X)
    damage(tmp_path / "a.jsonl.values" / "0")
    with pytest.raises(LedgerError, match=says):
        contents.values(contents.rows[2])
