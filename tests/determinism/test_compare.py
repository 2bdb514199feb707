"""`compare` names where two ledgers part first, and by how much, and ends with a status."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from eqx_norm.determinism import LedgerError, compare, monitor, recorded
from eqx_norm.determinism.__main__ import main
from eqx_norm.determinism._compare import difference
from tests.determinism.harness import X, written
from tests.helpers import f32
from tests.processes import python


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


def test_the_same(tmp_path, capsys):
    a, b = (run(tmp_path / name, *3 * [WEIGHT]) for name in "ab")
    says = "the same: 24 rows of 3 steps agree, to the bit"
    assert compare(a, b) == (True, 24, says, None, None, None)
    assert main(["compare", str(a), str(b)]) == 0
    assert capsys.readouterr().out == f"{says}\n"
    b.write_text(b.read_text().replace(f'"jax":"{jax.__version__}"', '"jax":"0.0.1"'))
    noted = f"{says}\n  they were written with different jax: {jax.__version__} and 0.0.1"
    assert compare(a, b).text == noted


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


def test_kept_values_say_by_how_much_and_damaged_ones_hide_nothing(tmp_path):
    a = run(tmp_path / "a", WEIGHT, step=keeping)
    b = run(tmp_path / "b", CHANGED, step=keeping)
    h = jnp.tanh(X)
    y, other = (np.asarray(h * weight) for weight in (WEIGHT, CHANGED))
    ulps = np.abs(y.view(np.int32) - other.view(np.int32)).max()
    text = str(compare(a, b))
    assert "2 of 6 elements differ" in text
    assert f"the first is [0, 2]: {y[0, 2]!s} and {other[0, 2]!s}" in text
    assert f"max difference {np.abs(y - other).max():.6g}, {ulps} ulp" in text
    values = tmp_path / "b.values" / "0.npz"
    values.write_bytes((tmp_path / "a.values" / "0.npz").read_bytes())
    assert "do not differ: they are not those of both runs" in str(compare(a, b))
    values.write_bytes(b"")
    verdict = compare(a, b)
    assert (verdict.same, verdict.step, verdict.probe) == (False, 0, "yes")
    assert f"values kept in {values}, which cannot be read" in str(verdict)


def test_another_branch_shape_or_dtype(tmp_path):
    a, b = run(tmp_path / "a", WEIGHT, WEIGHT), run(tmp_path / "b", WEIGHT, -WEIGHT)
    verdict = compare(a, b)
    assert (verdict.step, verdict.probe) == (1, "no")
    assert f"only {b} has passed it: the other took another branch" in str(verdict)
    identity = jax.jit(recorded(lambda x: monitor(x, "x")))
    xs = {"x": X, "y": X[:1], "z": X.astype(jnp.bfloat16)}
    x, y, z = (written(tmp_path / name, identity(x)[1]) for name, x in xs.items())
    assert (
        "shape and dtype: (2, 3) float32 and (1, 3) float32\n  nothing comes before it"
        in str(compare(x, y))
    )
    assert "(2, 3) float32 and (2, 3) bfloat16" in str(compare(x, z))


def test_what_cannot_be_compared_is_an_error(tmp_path, capsys):
    a, b = run(tmp_path / "a", WEIGHT), run(tmp_path / "b", WEIGHT, start=1)
    with pytest.raises(LedgerError, match="step 0: `h` forward, the other has step 1: `h`"):
        compare(a, b)
    nothing = jax.jit(recorded(lambda x, weight: x))
    pair = [run(tmp_path / name, WEIGHT, WEIGHT, step=nothing) for name in "xy"]
    assert f"{pair[0]} ends before step 0: `h` forward" in str(compare(pair[0], a))
    for paths, says in ((pair, "have no rows: nothing was recorded"), ("ab", "cannot be read")):
        assert main(["compare", *map(str, paths)]) == 2
        out, told = capsys.readouterr()
        assert (out, told.count("\n")) == ("", 1)
        assert says in told


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
        says = "not known to be the same: 15 rows of 2 steps agree, to the bit, and what came"
        assert str(verdict).startswith(says)
        assert str(verdict).count("is incomplete: the run was killed") == len({*pair} - {ends})
        assert main(["compare", *map(str, pair)]) == 1
    for shorter in (a, ends):
        verdict = compare(shorter, whole)
        assert (verdict.same, verdict.agreed, verdict.step) == (False, 15, None)
        says = f"{shorter} ends before step 1: `h` cotangent, with which {whole} goes on"
        assert says in str(verdict)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (f32([1, 2]), f32([1, 2.5]), "max difference 0.5, 2097152 ulp"),
        (f32([0.0]), f32([-0.0]), "max difference 0, 0 ulp"),
        (f32([np.inf, 1]), f32([1, 2]), "2 of 2 elements differ; .* max difference inf"),
        (np.array([True]), np.array([False]), "the first is .0.: True and False; max .* 1$"),
        (np.array([1 + 1j], np.complex64), np.array([1 + 2j], np.complex64), "8388608 ulp"),
        (np.array([1.0]), np.array([-1.0]), "max difference 2, 9214364837600034816 ulp"),
        (jnp.bfloat16(1), jnp.bfloat16(2), "first is ..: 1 and 2; max difference 1, 128 ulp"),
    ],
    ids=map(str, range(7)),
)
def test_differences(a, b, expected):
    text = "; ".join(difference(np.asarray(a), np.asarray(b)))
    assert re.search(expected, text), text


def test_help_teaches_and_bad_arguments_end_with_2():
    told = python("-m", "eqx_norm.determinism", "--help").stdout
    for word in ("compare", "monitor_module", "recorded(train_step", "exit status: 0"):
        assert word in told
    for arguments in ([], ["compare", "a"]):
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
