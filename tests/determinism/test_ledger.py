"""A ledger is written step by step, survives its run, and tells if it was damaged."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm.determinism import Ledger, LedgerError, compare, monitor, read, recorded
from tests.determinism.harness import X, written
from tests.helpers import bits


def step(x):
    jax.lax.cond(x[0, 0] > 99, lambda x: monitor(x, "not"), lambda x: x, x)
    key = jax.random.key(3)
    tree = {"x": x, "empty": x[:0], "half": x.astype(jnp.bfloat16), "key": key}
    return monitor(tree, "in")


RECORD = jax.jit(recorded(step, keep_values=True))(X)[1]
BARE = jax.jit(recorded(lambda x: monitor([x, 2 * x], "x")))(X)[1]


def test_what_is_written_is_read(tmp_path):
    contents = read(written(tmp_path / "a.jsonl", RECORD, start=7))
    assert not contents.is_truncated
    assert contents.header["jax"] == jax.__version__
    assert [row[:5] for row in contents.rows] == [
        (7, name, "forward", (), 1) for name in ("not", "in.empty", "in.half", "in.key", "in.x")
    ]
    assert [row.shape for row in contents.rows] == [(2, 3), (0, 3), (2, 3), (), (2, 3)]
    dtypes = [row.dtype for row in contents.rows]
    assert dtypes == ["float32", "float32", "bfloat16", "key<fry>", "float32"]
    assert [row.fingerprint for row in contents.rows[:2]] == [None, "0" * 16]
    assert contents.values(contents.rows[0]) is None
    values: Any = map(contents.values, contents.rows[1:])
    expected = [X[:0], X.astype(jnp.bfloat16), jax.random.key_data(jax.random.key(3)), X]
    for value, array in zip(values, expected, strict=True):
        assert (value.dtype, bits(value)) == (array.dtype, bits(array))


def test_a_step_is_written_once_and_at_once(tmp_path):
    with Ledger(tmp_path / "a.jsonl") as ledger:
        for step in (np.int64(2), 0):
            ledger.append(step, BARE)
            assert read(ledger.path).rows[-1].step == step
        with pytest.raises(ValueError, match="has a step 2 already"):
            ledger.append(2, BARE)
    with pytest.raises(ValueError, match="closed"):
        ledger.append(3, BARE)


def test_neither_a_ledger_nor_its_values_are_written_over(tmp_path):
    path = written(tmp_path / "a.jsonl", RECORD)
    with pytest.raises(FileExistsError, match="there is .*a.jsonl, and neither"):
        Ledger(path)
    path.rename(tmp_path / "old.jsonl")  # and not its values
    with pytest.raises(FileExistsError, match="there is .*a.jsonl.values, and neither"):
        Ledger(path)
    assert not path.exists()


@pytest.fixture
def ledger(tmp_path):
    return written(tmp_path / "a.jsonl", *3 * [BARE])


def test_cut_anywhere_it_is_a_readable_prefix_and_never_the_same(ledger, tmp_path):
    content, whole, cut = ledger.read_bytes(), read(ledger), tmp_path / "cut.jsonl"
    for size in range(len(content)):
        cut.write_bytes(content[:size])
        complete = content[:size].count(b"\n") - 1
        if complete < 0:
            with pytest.raises(LedgerError, match="no ledger, or a damaged one: line 1 is not"):
                read(cut)
            continue
        assert read(cut).rows == whole.rows[:complete]
        assert read(cut).is_truncated == (content[size - 1 : size] != b"\n")
        assert not compare(ledger, cut).same


def test_no_flipped_bit_of_a_row_makes_it_the_same(ledger, tmp_path):
    content, other = ledger.read_bytes(), tmp_path / "other.jsonl"
    for place in range(content.index(b"\n"), len(content)):
        for bit in (1, 4, 32):
            flipped = content[place] ^ bit
            other.write_bytes(content[:place] + bytes([flipped]) + content[place + 1 :])
            with contextlib.suppress(LedgerError):
                assert not compare(ledger, other).same


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda text: "", "line 1 is not"),
        (lambda text: "{}\n", "line 1 is not"),
        (lambda text: "[1]\n" + text, "line 1 is not"),
        (
            lambda text: text.replace("version 3", "version 2"),
            "line 1 is not.*, version 3, has",
        ),
        (lambda text: text.replace("\n", "\n\xff", 1), "line 2 is not"),
        (lambda text: text.replace(',"again":1', "", 1), "line 2 is not"),
        (lambda text: text.replace("again", "more", 1), "line 2 is not"),
        (lambda text: 2 * text, "line 8 is not"),
    ],
)
def test_damaged_ledgers_and_other_files_are_refused(ledger, damage, says):
    ledger.write_bytes(damage(ledger.read_text("ascii")).encode("latin-1"))
    with pytest.raises(LedgerError, match=f"a.jsonl is no ledger, or a damaged one: {says}"):
        read(ledger)


def test_what_cannot_be_opened_is_an_error(tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(
            LedgerError, match="cannot be read \\((Is a directory|No such file)"
        ):
            read(path)


@pytest.mark.parametrize(
    "damage", [lambda file: file.unlink(), lambda file: file.write_bytes(b"PK")]
)
def test_values_that_cannot_be_read_are_told(tmp_path, damage):
    contents = read(written(tmp_path / "a.jsonl", RECORD))
    damage(tmp_path / "a.jsonl.values" / "0.npz")
    with pytest.raises(LedgerError, match="values kept in .*0.npz, which cannot be read"):
        contents.values(contents.rows[-1])
