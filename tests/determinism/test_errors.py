"""Tests that arguments of the wrong kind are errors that name what was given and the fix."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm.determinism import (
    Ledger,
    compare,
    deterministic,
    fingerprint,
    monitor,
    monitor_module,
    read,
    recorded,
)

UNOPTIMISED = True  # compares values: tests/compiling.py

X = jnp.ones(3)
MODEL = [eqx.nn.LayerNorm(3)]
RECORD = recorded(lambda x: monitor(x, "x"))(X)[1]
MISTAKEN: dict[str, Any] = {
    "array": np.ones(3),
    "record": RECORD,
    "output, record": (X, RECORD),
    "model": MODEL,
    "text": "text",
    "bytes": b"text",
    "nothing": None,
    "number": 3,
    "exhausted": iter(()),
    "empty list": [],
    "empty dict": {},
}
NO_PATH = (
    "a (ndarray|Record|tuple|list|bytes|None.*|int|tuple_it.*|dict) is no path of a file. Give"
)
NO_RECORD = "^ledger.append.*: give the number of the step, .* output, record = step"


@pytest.fixture
def ledger(tmp_path):
    with Ledger(tmp_path / "a") as ledger:
        yield ledger


# A call with a ledger and an argument of a wrong kind, the kinds that are right, and the error.
KINDS: list[tuple[Any, list[str], str]] = [
    (lambda _, v: Ledger(v), ["text"], rf"^Ledger\(path\): {NO_PATH} text or a pathlib.Path"),
    (lambda _, v: read(v), ["text"], rf"^read\(path\): {NO_PATH} text"),
    (lambda _, v: compare(v, "b"), ["text"], rf"^read\(path\): {NO_PATH} text"),
    (lambda ledger, v: compare(ledger.path, v), ["text"], rf"^read\(path\): {NO_PATH} text"),
    (lambda ledger, v: ledger.append(0, v), ["record"], NO_RECORD),
    (lambda ledger, v: ledger.append(v, RECORD), ["number"], NO_RECORD),
    (lambda _, v: recorded(v), [], r"^recorded\(\w+\): pass the function itself, recorded\("),
    (lambda _, v: monitor(X, v), ["text"], "(?s)^monitor.*: pass a name"),
    (lambda _, v: monitor_module(MODEL, v), ["text"], "(?s)^monitor_module.*: give a prefix"),
    (lambda _, v: monitor_module(v), ["model"], "^monitor_module.*: there is no layer in this"),
    (
        lambda _, v: fingerprint(v),
        ["array", "record", "output, record", "model"],
        "^fingerprint.*: the tree has no array",
    ),
    (lambda _, v: deterministic(v), ["number"], "(?s)^deterministic.*: seed must be an int"),
    (
        lambda _, v: deterministic(0, cpu_threads=v),
        ["number", "nothing"],
        "(?s)^deterministic.*: seed must be an int",
    ),
]


# JAX warns of an iterator in a pytree, which becomes an error of JAX later.
@pytest.mark.filterwarnings("ignore:Python iterable type:DeprecationWarning")
@pytest.mark.parametrize(("call", "right", "error"), KINDS)
def test_arguments_of_the_wrong_kind_are_errors(unchecked, ledger, call, right, error):
    for name, value in MISTAKEN.items():
        if name not in right:
            with pytest.raises((TypeError, ValueError), match=error):
                call(ledger, value)


def test_a_ledger_in_place_of_its_path_is_an_error(unchecked, ledger):
    mistaken: Any = ledger
    for call in (read, Ledger, lambda it: compare(it, it)):
        with pytest.raises(TypeError, match="a Ledger is no path of a file. Give its .path"):
            call(mistaken)
