"""Errors quote what was written, say what it breaks and how to mend it; nothing is lost."""

import os
import subprocess
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import BatchNorm, _approach
from eqx_norm.strategies import (
    NAMED,
    AbstractStrategy,
    Batch,
    Ema,
    Moments,
    Running,
    VarianceClip,
)

from .helpers import call, copy, make, normal, over_batch

ROOT = Path(__file__).parents[1]
X = normal(0, (6, 3, 2))


@pytest.fixture
def layer_and_state():
    return make(3, "batch", approach="batch")


def assert_usable(layer, state):
    y, _ = over_batch(layer)(X, state)
    assert np.isfinite(y).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"approach": "batches"}, "approach='batches' is not known.*'ema', 'batch', 'adam'"),
        ({"momentum": 1.0}, "momentum=1.0.*strictly between 0 and 1"),
        ({"momentum": 0.0}, "momentum=0.0.*strictly between 0 and 1"),
        ({"momentum": -0.1}, "momentum=-0.1.*strictly between 0 and 1"),
        ({"eps": 0.0}, "eps=0.0.*greater than 0"),
        ({"eps": -1e-5}, "eps=-1e-05.*greater than 0"),
        ({"eps": float("nan")}, "eps=nan.*greater than 0"),
        ({"input_size": 0}, "input_size=0.*an int of 1 or more"),
        ({"dtype": jnp.int32}, "dtype=int32.*a float or complex dtype"),
        (
            {"approach": Ema(0.9), "momentum": 0.9},
            r"momentum=0\.9 was given beside approach=Ema.*belongs to the strategy",
        ),
        (
            {"approach": VarianceClip(), "momentum": 0.99},
            r"momentum=0\.99 was given beside approach=VarianceClip",
        ),
        ({"mode": "legacy"}, "mode='legacy' is neither 'ema' nor 'batch'.*approach="),
        ({"mode": "adam", "approach": None}, "mode='adam' is neither.*approach="),
        ({"mode": "ema"}, "mode='ema' and approach='batch'.*Leave one of them out"),
        (
            {"mode": "ema", "approach": Ema(0.9)},
            r"mode='ema' and approach=Ema\(momentum=0.9\).*Leave one of them out",
        ),
    ],
    ids=str,
)
def test_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        BatchNorm(**{"input_size": 3, "axis_name": "batch", "approach": "batch", **arguments})


def test_an_approach_by_name_is_that_strategy_with_the_layer_s_momentum():
    for name, make_strategy in NAMED.items():
        by_name = BatchNorm(3, "batch", momentum=0.8, approach=name)
        as_object = BatchNorm(3, "batch", approach=make_strategy(0.8))
        assert by_name.approach == as_object.approach
        assert BatchNorm(3, "batch", approach=name).approach == make_strategy(0.99)
        assert by_name.momentum == as_object.momentum == 0.8
    assert BatchNorm(3, "batch", approach=VarianceClip(Ema(0.7))).momentum == 0.7
    assert BatchNorm(3, "batch", approach=VarianceClip(Cumulative())).momentum is None


@pytest.mark.parametrize(("name", "strategy"), [("batch", Batch), ("ema", Ema)])
def test_equinox_s_mode_is_the_approach_of_that_name(name, strategy):
    """And says it: a warning would be an error here."""
    _approach._warn_of_the_default.cache_clear()
    assert BatchNorm(3, "batch", mode=name).approach == strategy(0.99)
    assert BatchNorm(3, "batch", momentum=0.8, mode=name, approach=name).momentum == 0.8
    by_position = (3, "batch", 1e-5, True, 0.9, False, None, name)
    assert BatchNorm(*by_position).approach == strategy(0.9)
    assert eqx.nn.BatchNorm(*by_position).mode == name


def test_without_an_approach_it_warns_once_and_takes_batch():
    _approach._warn_of_the_default.cache_clear()
    with pytest.warns(UserWarning, match="takes approach='batch'.*mode='ema'.*issues/659"):
        layer = BatchNorm(3, "batch")
    assert layer.approach == Batch(0.99)
    BatchNorm(3, "batch")  # a second warning would be an error here


# In a process of its own: where annotations are checked, there are frames in between.
WARNED = """
import functools, warnings
import equinox as eqx, jax
from eqx_norm import BatchNorm, _approach

class Sub(BatchNorm):
    def __init__(self, channels):
        super().__init__(channels, "b")  # Sub

class Model(eqx.Module):
    norm: BatchNorm
    def __init__(self):
        self.norm = BatchNorm(3, "b")  # Model

def build():
    return eqx.nn.Sequential([BatchNorm(3, "b")])  # build

layer = functools.partial(BatchNorm, axis_name="b")
for make in (
    lambda: BatchNorm(3, "b"),  # the layer
    lambda: eqx.nn.make_with_state(BatchNorm)(3, "b"),  # make_with_state
    lambda: Sub(3),
    lambda: eqx.nn.make_with_state(Model)(),
    eqx.nn.make_with_state(build),
    eqx.filter_vmap(eqx.nn.make_with_state(build), axis_size=2),
    lambda: jax.tree.map(layer, [3, 4]),  # tree.map
    lambda: eqx.filter_eval_shape(layer, 3),  # eval_shape
):
    _approach._warn_of_the_default.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make()
    print(*[f"{warned.filename}:{warned.lineno}" for warned in caught])
"""


def test_the_warning_points_to_the_user_s_line(tmp_path):
    path = tmp_path / "model.py"
    path.write_text(WARNED)
    run = subprocess.run(
        [sys.executable, path],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = dict(enumerate(WARNED.splitlines(), 1))
    found = [place.rpartition(":") for place in run.stdout.splitlines()]
    assert {file for file, *_ in found} == {str(path)}
    assert [lines[int(line)].partition("# ")[2] for *_, line in found] == [
        "the layer",
        "make_with_state",
        "Sub",
        "Model",
        "build",
        "build",
        "tree.map",
        "eval_shape",
    ]


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((6, 4, 2), r"x has shape \(4, 2\).*input_size=3.*the number of channels of its input"),
        ((6, 4, 3), r"x has shape \(4, 3\).*This looks like a batch.*jax.vmap"),
        ((6,), r"x has shape \(\).*input_size=3"),
    ],
    ids=str,
)
def test_wrong_number_of_channels(layer_and_state, shape, message):
    layer, state = layer_and_state
    with pytest.raises(ValueError, match=message):
        over_batch(layer)(jnp.ones(shape), state)
    assert_usable(layer, state)


def test_unbound_axis_name(layer_and_state):
    layer, state = layer_and_state
    message = "The axis name 'batch' is not bound.*\n.*jax.vmap.*axis_name='batch'"
    with pytest.raises(NameError, match=message):
        layer(X[0], state)
    with pytest.raises(NameError, match=message):
        jax.vmap(layer, in_axes=(0, None), out_axes=(0, None))(X, state)
    with pytest.raises(NameError, match=message):
        over_batch(layer, "another")(X, state)
    assert_usable(layer, state)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint8, jnp.bool_])
def test_integers(layer_and_state, dtype):
    layer, state = layer_and_state
    with pytest.raises(TypeError, match=rf"dtype {jnp.dtype(dtype)}.*x.astype\(jnp.float32\)"):
        over_batch(layer)(X.astype(dtype), state)
    assert_usable(layer, state)


def test_complex_input_to_a_real_layer_and_the_reverse(layer_and_state):
    layer, state = layer_and_state
    with pytest.raises(TypeError, match=r"made for real input.*dtype=jnp.complex64"):
        over_batch(layer)(X.astype(jnp.complex64), state)
    assert_usable(layer, state)
    layer, state = make(3, "batch", approach="batch", dtype=jnp.complex64)
    with pytest.raises(TypeError, match=r"made for complex input.*x.astype\(jnp.complex64\)"):
        over_batch(layer)(X, state)


def test_a_state_that_belongs_to_another_model(layer_and_state):
    layer, state = layer_and_state
    other, other_state = eqx.nn.make_with_state(
        lambda: eqx.nn.Sequential([BatchNorm(3, "batch", approach="batch")])
    )()
    with pytest.raises(ValueError, match="made for another model.*make_with_state"):
        over_batch(layer)(X, other_state)
    assert_usable(layer, state)
    assert_usable(other, other_state)


class Cumulative(AbstractStrategy[Moments]):
    """The user's own, against the public contract alone: all values ever seen."""

    def init(self, channels, dtype):
        return Moments.zero(channels, dtype)

    def update(self, batch, memory):
        return batch, memory.merge(batch)

    def infer(self, memory):
        return memory


@pytest.mark.parametrize(
    "other", [{"input_size": 4}, {"approach": Cumulative()}], ids=["channels", "approach"]
)
def test_a_state_that_belongs_to_another_layer(layer_and_state, other):
    """`make_with_state` gives both states the same key, so their form has to be looked at."""
    layer, state = layer_and_state
    _, other_state = make(
        **{"input_size": 3, "axis_name": "batch", "approach": "batch", **other}
    )
    for mode in (layer, eqx.nn.inference_mode(layer)):
        with pytest.raises(ValueError, match="belongs to another layer.*input_size=3"):
            over_batch(mode)(X, other_state)
    assert_usable(layer, state)


def test_a_used_up_state_is_equinox_s_error():
    layer, state = make(3, "batch", approach="batch")

    def twice(x, state):
        _, new = layer(x, state)
        return layer(x, state)[0], new

    with pytest.raises(ValueError, match="Attempted to use old state"):
        over_batch(twice)(X, state)
    assert_usable(layer, state)


@pytest.mark.parametrize("shape", [(1, 3), (1, 3, 1)], ids=str)
def test_unbiased_variance_of_one_value(shape):
    layer, state = make(3, "batch", approach="batch", unbiased=True)
    x = jnp.ones(shape)
    with pytest.raises(ValueError, match=r"x has shape \(3,.*1 values per channel.*n = 1"):
        over_batch(layer)(x, state)
    with pytest.raises(ValueError, match="unbiased=False"):
        jax.eval_shape(over_batch(layer), x, copy(state))  # known at trace time
    assert_usable(layer, state)


def test_no_values_at_all(layer_and_state):
    layer, state = layer_and_state
    with pytest.raises(ValueError, match="hold 0 examples: 0 values per channel"):
        over_batch(layer)(jnp.ones((6, 3, 0)), state)
    assert_usable(layer, state)


class Careless(AbstractStrategy[Running]):
    """Forgets to keep the memory's form."""

    def init(self, channels, dtype):
        return Running.empty(channels, dtype)

    def update(self, batch, memory):
        return batch, Running(memory.mean, memory.variance, memory.weight.astype(jnp.float16))

    def infer(self, memory):
        return memory.moments


def test_a_strategy_that_changes_the_form_of_its_memory():
    layer, state = make(3, "batch", approach=Careless())
    with pytest.raises(ValueError, match=r"Careless\.update returned a memory of another"):
        over_batch(layer)(X, state)


@pytest.mark.parametrize(
    ("arguments", "spoil"),
    [
        ({}, lambda x: x[:2]),
        ({}, lambda x: x.astype(jnp.int32)),
        ({}, lambda x: x.astype(jnp.complex64)),
        ({}, lambda x: x[:, :0]),
        ({"approach": Careless()}, lambda x: x),
    ],
    ids=["channels", "integers", "complex", "empty", "careless strategy"],
)
def test_a_failed_call_leaves_the_state_usable(arguments, spoil):
    """Where the error is caught inside the vmap, so that vmap has made no copy of the state."""
    layer, state = make(3, "batch", **{"approach": "batch", **arguments})
    good, _ = make(3, "batch", approach="batch")

    def fail_then_succeed(x, state):
        with pytest.raises((ValueError, TypeError)):
            layer(spoil(x), state)
        return good(x, state)

    y, after = over_batch(fail_then_succeed)(X, state)
    right, _ = call(good, make(3, "batch", approach="batch")[1], X)
    np.testing.assert_allclose(y, right, atol=1e-6)
    assert after.get(good.memory_index).weight > 0


@pytest.mark.parametrize("unbiased", [False, True])
def test_a_strategy_of_the_user_s_own(unbiased):
    layer, state = make(3, "batch", approach=Cumulative(), unbiased=unbiased)
    batches = [normal(seed, (n, 3, 2), seed, 2) for seed, n in enumerate((6, 4, 9))]
    inference = eqx.nn.inference_mode(layer)
    np.testing.assert_allclose(call(inference, copy(state), X)[0], X, rtol=1e-5)
    for x in batches:
        _, state = call(layer, state, x)
    everything = np.concatenate(batches)
    mean, std = (f(everything, axis=(0, 2))[:, None] for f in (np.mean, np.std))
    np.testing.assert_allclose(call(inference, state, X)[0], (X - mean) / std, atol=1e-4)


# Arguments of a wrong type: in these tests the annotations are checked and speak first, so
# look at what a user sees, in a process of its own.
WRONG_TYPES = """
from eqx_norm import BatchNorm, strategies
for arguments in (
    dict(approach=strategies.Ema), dict(approach=3), dict(input_size=3.0),
    dict(implementation="cuda"),
):
    try:
        BatchNorm(**{"input_size": 3, "axis_name": "b", "approach": "batch", **arguments})
    except ValueError as error:
        print(error)
"""


def test_arguments_of_a_wrong_type():
    run = subprocess.run(
        [sys.executable, "-c", WRONG_TYPES], capture_output=True, text=True, check=True
    )
    one, two, three, four = run.stdout.splitlines()
    assert "Ema" in one
    assert "with the parentheses" in one
    assert "approach=3 is neither a name nor a strategy" in two
    assert "input_size=3.0: it is the number of channels, an int" in three
    assert "implementation='cuda' is not available. Available are 'auto', 'xla'" in four
