"""Tests that ledgers are written step by step, survive killed runs, and show differences."""

import re
import runpy
import sys
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from eqx_norm import determinism
from eqx_norm.determinism import Ledger, compare, monitor, read, recorded
from eqx_norm.determinism._compare import difference
from tests.compiling import jit
from tests.helpers import bits, f32, normal

UNOPTIMISED = True  # compares values: tests/compiling.py

X = normal(0, (2, 3))
WEIGHT, CHANGED = f32([1, 2, 3]), f32([1, 2, 3 + 3 * 2**-22])  # 3 ulp more


def loss(x, weight):
    h = monitor(jnp.tanh(x), "h")
    yes, no = (lambda h: monitor(h * weight, "yes")), (lambda h: monitor(h, "no"))
    return jnp.sum(monitor(lax.cond(weight[0] > 0, yes, no, h), "y") ** 2)


step = jit(recorded(jax.value_and_grad(loss)))
keeping = jit(recorded(jax.value_and_grad(loss), keep_values=True))


def written(path, *records, start=0):
    """Writes a ledger of these steps, and returns its path."""
    with Ledger(path) as ledger:
        for step, record in enumerate(records, start):
            ledger.append(step, record)
    return path


def run(path, *weights, step=step, start=0):
    return written(path, *(step(X, weight)[1] for weight in weights), start=start)


def test_ledger_reads_back_the_written_rows_and_values(tmp_path):
    arrays = {"empty": X[:0], "half": X.astype(jnp.bfloat16), "key": jax.random.key(3), "x": X}

    def step(x):
        lax.cond(x[0, 0] > 99, lambda x: monitor(x, "not"), lambda x: x, x)
        return monitor(arrays, "in"), monitor(x, "in.x")

    record = jit(recorded(step, keep_values=True))(X)[1]
    contents = read(written(tmp_path / "a", record, start=7))
    assert (contents.is_truncated, contents.header["jax"]) == (False, jax.__version__)
    not_passed, *rows = contents.rows
    assert not_passed[:6] == (7, "not", "forward", (), 1, None)
    names = [(f"in.{name}", 1) for name in arrays]
    assert [(row.probe, row.again) for row in rows] == [*names, ("in.x", 2)]
    for row, array in zip(rows, [*arrays.values(), X], strict=True):
        assert (row.shape, row.dtype) == (array.shape, str(array.dtype))
        data = jax.random.key_data(array) if row.probe == "in.key" else array
        value = np.asarray(contents.values(row))
        assert (value.dtype, bits(value)) == (data.dtype, bits(data))


def test_ledger_writes_a_step_once_and_at_once_and_overwrites_no_file(tmp_path):
    record = step(X, WEIGHT)[1]
    with Ledger(tmp_path / "a") as ledger:
        for number in (np.int64(2), 0):
            ledger.append(number, record)
            assert read(ledger.path).rows[-1].step == number
        with pytest.raises(ValueError, match="has a step 2 already"):
            ledger.append(2, record)
        with pytest.raises(ValueError, match="Take one out of a vmap or scan"):
            ledger.append(3, jax.tree.map(lambda a: jnp.stack([a, a]), record))
    (tmp_path / "b.values").mkdir()
    for name, existing in (("a", "a"), ("b", "b.values")):
        with pytest.raises(FileExistsError, match=f"{existing} exists"):
            Ledger(tmp_path / name)


def test_truncated_ledger_never_compares_as_the_same(tmp_path):
    ledger, other = run(tmp_path / "a", WEIGHT), tmp_path / "b"
    content, rows = ledger.read_bytes(), read(ledger).rows
    lines = [end.start() + 1 for end in re.finditer(rb"\n", content)]
    for place in {*lines, *range(lines[0] + 1, len(content), 17)} - {len(content)}:
        other.write_bytes(content[:place])
        cut = read(other)
        assert cut.rows == rows[: content[:place].count(b"\n") - 1]
        assert cut.is_truncated == (place not in lines)
        assert not compare(ledger, other).same
        assert not cut.rows or compare(other, other).same != cut.is_truncated


@pytest.fixture
def program(monkeypatch, capsys):
    """Returns a function that gives the exit status and the output of the program."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module(determinism.__name__, run_name="__main__")
        return ended.value.code, *capsys.readouterr()

    return run


def test_compare_names_the_first_difference_and_its_size(tmp_path, program):
    a, a_too = (run(tmp_path / name, WEIGHT, WEIGHT) for name in ("a", "a_too"))
    text = "the same: 16 rows of 2 steps agree, to the bit"
    assert compare(a, a_too) == (True, 16, text, None, None, None)
    assert program("compare", a, a_too) == (0, f"{text}\n", "")
    b = run(tmp_path / "b", WEIGHT, CHANGED)
    verdict = compare(a, b)
    assert verdict == (False, 10, str(verdict), 1, "yes", "forward")
    assert str(verdict).startswith("step 1: `yes` forward\n  fingerprints ")
    assert "values were not kept: recorded(step, keep_values=True)" in str(verdict)
    assert str(verdict).endswith("10 rows agree; the last is step 1: `no` forward")
    assert program("compare", a, b) == (1, f"{verdict}\n", "")
    a, b = (run(tmp_path / n, w, step=keeping) for n, w in (("c", WEIGHT), ("d", CHANGED)))
    assert "2 of 6 elements differ\n  the first is [0, 2]: " in str(compare(a, b))


def test_compare_names_another_branch_an_early_end_and_another_version(tmp_path):
    a, b = run(tmp_path / "a", WEIGHT, WEIGHT), run(tmp_path / "b", WEIGHT, -WEIGHT)
    short = run(tmp_path / "short", WEIGHT)
    assert compare(a, b).probe == "no"
    assert f"only {b} passed it: the other took another branch" in str(compare(a, b))
    verdict = compare(short, a)
    assert (verdict.same, verdict.agreed, verdict.step) == (False, 8, None)
    assert f"{short} ends before step 1: `h` forward, where {a} continues" in str(verdict)
    b.write_text(a.read_text().replace(jax.__version__, "0.1", 1))
    assert str(compare(a, b)).endswith(f"different jax: {jax.__version__} and 0.1")


def test_compare_exits_with_2_and_one_line_for_incomparable_ledgers(tmp_path, program):
    a, b = run(tmp_path / "a", WEIGHT), run(tmp_path / "b", WEIGHT, start=1)
    cases = [
        (a, b, "step 0: `h` forward, the other has step 1: `h`"),
        (*(written(tmp_path / name) for name in "xy"), "have no rows: nothing was recorded"),
        (a, tmp_path / "none", "cannot be read"),
    ]
    for old, new in (("{", "[1]{"), ("version 4", "version 3"), (',"again":1', "")):
        path = tmp_path / f"changed{len(cases)}"
        path.write_text(a.read_text().replace(old, new, 1))
        cases.append((a, path, "is not an eqx_norm.determinism ledger, version 4, or is dam"))
    kept, too = (run(tmp_path / n, w, step=keeping) for n, w in (("k", WEIGHT), ("l", CHANGED)))
    for name, content in (("empty", b""), ("cut", b"PK\3\4"), ("another", None)):
        damaged = tmp_path / name
        damaged.write_bytes(kept.read_bytes())
        values = tmp_path / f"{name}.values"
        values.mkdir()
        np.savez(values / "0.npz", other=X)
        if content is not None:
            (values / "0.npz").write_bytes(content)
        cases.append((damaged, too, "0.npz is damaged, or of another ledger: the values of `"))
    for name, change in (("same", lambda v: v), ("cast", np.float64), ("longer", np.ravel)):
        other = tmp_path / name
        other.write_bytes(kept.read_bytes())
        (tmp_path / f"{name}.values").mkdir()
        with np.load(f"{too}.values/0.npz") as values:
            changed: Any = {place: change(values[place]) for place in values}
        np.savez(tmp_path / f"{name}.values" / "0.npz", **changed)
        cases.append((other, too, "one folder is of another ledger. Delete both folders"))
    for first, second, error in cases:
        status, out, printed = program("compare", first, second)
        assert (status, out, printed.count("\n")) == (2, "", 1)
        assert error in printed
    assert "exit status: 0 the same" in program("--help")[1]


def test_difference_reports_elements_and_ulps():
    for a, b, expected in (
        (f32([0.0, 2]), f32([-0.0, 2.5]), "2 of 2 .* max difference 0.5, 2097152 ulp"),
        (np.array([True]), np.array([False]), "True and False; max difference 1$"),
        (jnp.bfloat16(1), jnp.bfloat16(2), "1 and 2; max difference 1, 128 ulp"),
    ):
        assert re.search(expected, "; ".join(difference(np.asarray(a), np.asarray(b))))


@jit
@recorded
@jax.grad
def training_step(weights, x, y, key):
    h = monitor(x, "x") @ monitor(weights, "weights")
    h = monitor(eqx.nn.Dropout(0.5)(h, key=key), "dropout")
    return monitor(jnp.mean((jnp.sum(h, 1) - y) ** 2), "loss")


WEIGHTS, XS, YS = normal(0, (8, 8)), normal(1, (4, 8)), normal(2, (4,))
FLIPPED = (WEIGHTS.view(jnp.int32) ^ jnp.eye(8, dtype=jnp.int32)[3]).view(jnp.float32)
# The arguments that a fault changes in the second of two steps, and the verdict of `compare`.
FAULTS: dict[str, Any] = {
    "a flipped bit": ({"weights": FLIPPED}, "step 1: `weights` forward"),
    "a shuffled loader": ({"x": XS[::-1], "y": YS[::-1]}, "step 1: `x` forward"),
    "another key": ({"key": jax.random.key(1)}, "step 1: `dropout` forward"),
    "another label": ({"y": YS.at[0].add(1)}, "step 1: `loss` forward"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_compare_finds_each_fault_at_its_origin(tmp_path, fault):
    changed, verdict = FAULTS[fault]
    given = {"weights": WEIGHTS, "x": XS, "y": YS, "key": jax.random.key(0)}
    good, bad = (training_step(*(given | new).values())[1] for new in ({}, changed))
    a, b = written(tmp_path / "a", good, good), written(tmp_path / "b", good, bad)
    assert str(compare(a, b)).startswith(verdict)
