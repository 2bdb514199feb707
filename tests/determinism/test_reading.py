"""A ledger that is cut, damaged or none at all is told, and so are the values beside it."""

import os

import numpy as np
import pytest

from eqx_norm.determinism import LedgerError, _ledger, read
from tests.determinism.harness import X, with_header, written
from tests.helpers import bits


@pytest.fixture
def ledger(tmp_path, bare):
    return written(tmp_path / "a.jsonl", *3 * [bare])


@pytest.fixture
def kept(tmp_path, records):
    return written(tmp_path / "a.jsonl", *records)


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


def rows_twice(path):
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


NOT_REGULAR = "cannot be read \\(it is no regular file"


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (rows_twice, "has the step 0 twice"),
        (lambda path: path.write_bytes(2 * path.read_bytes()), "second ledger from line 11 on"),
        (lambda path: path.unlink(), "cannot be read \\(No such file"),
        (a_link_to("."), "cannot be read \\(Is a directory"),
        (lambda path: path.write_bytes(bytes(range(256)) * 9), "first line is not that of one"),
        (
            lambda path: with_header(path, version=1),
            "of version 1, and this eqx_norm reads version 2",
        ),
        (lambda path: with_header(path, device=None), "its first line tells of no device"),
        (a_pipe, NOT_REGULAR),
        (a_link_to("/dev/zero"), NOT_REGULAR),
        (a_link_to("/dev/null"), NOT_REGULAR),
        # With holes.
        (lambda path: os.truncate(path, 2**32), "has a line of more than 65536 bytes"),
        (
            lambda path: os.truncate(path, 2**32 + 1),
            "4294967297 bytes, and a ledger that is read has",
        ),
    ],
)
def test_damaged_ledgers_and_other_files_are_refused(ledger, damage, says):
    damage(ledger)
    with pytest.raises(LedgerError, match=says):
        read(ledger)


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


def a_link_elsewhere(file):
    file.symlink_to(file.rename(file.parent.parent / "elsewhere"))


def a_folder_elsewhere(file):
    file.parent.symlink_to(file.parent.rename(file.parent.parent / "elsewhere"))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda file: file.unlink(), "values kept in .*a.jsonl.values/0, which cannot"),
        (lambda file: os.truncate(file, 35), "which cannot be read \\(it is too short\\)"),
        (lambda file: file.write_bytes(b""), "too short"),
        (flipped, "not those that step 0: `in.x` forward saw: their fingerprint is"),
        (
            lambda file: file.write_bytes((file.parent / "1").read_bytes()),
            "They are damaged, or another run's",
        ),
        (a_pipe, "it is no regular file"),
        # A row says where in its step's file its values are, and has no way to name another;
        # nor does a link lead to one.
        (a_link_elsewhere, "cannot be read \\(Too many levels of symbolic"),
        (a_folder_elsewhere, "cannot be read \\(its folder is a link"),
    ],
)
def test_damaged_values_are_told(kept, damage, says):
    contents = read(kept)
    assert bits(contents.values(contents.rows[2])) == bits(X)
    damage(kept.parent / "a.jsonl.values" / "0")
    with pytest.raises(LedgerError, match=says):
        contents.values(contents.rows[2])
