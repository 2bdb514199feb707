"""Tests that errors quote what was written, what it breaks and the fix, and keep the state."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import BatchNorm, _approach
from eqx_norm.strategies import NAMED, Batch, Ema, VarianceClip
from tests.helpers import Cumulative, call, copy, make, normal, over_batch
from tests.layers.masking import masked
from tests.processes import ROOT, python

X = normal(0, (6, 3, 2))


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
    """And is no reason for the warning, which would be an error here."""
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


@pytest.mark.x32
def test_the_warning_points_to_the_user_s_line(tmp_path):
    path = tmp_path / "model.py"
    path.write_text(WARNED)
    run = python(path, PYTHONPATH=str(ROOT))
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


def assert_usable(layer, state):
    y, _ = over_batch(layer)(X, state)
    assert np.isfinite(y).all()


COMPLEX = {"dtype": jnp.complex64}
# What the layer is made with, what is done to x, and the error.
CALLS = {
    "channels": (
        {},
        lambda x: jnp.ones((4, 2)),
        r"x has shape \(4, 2\).*input_size=3.*the number of channels of its input",
    ),
    "a batch": (
        {},
        lambda x: jnp.ones((4, 3)),
        r"x has shape \(4, 3\).*This looks like a batch.*jax.vmap",
    ),
    "no channels": ({}, lambda x: x[0, 0], r"x has shape \(\).*input_size=3"),
    "int": ({}, lambda x: x.astype(jnp.int32), r"dtype int32.*x.astype\(jnp.float32\)"),
    "uint": ({}, lambda x: x.astype(jnp.uint8), r"dtype uint8.*x.astype\(jnp.float32\)"),
    "bool": ({}, lambda x: x.astype(bool), r"dtype bool.*x.astype\(jnp.float32\)"),
    "complex": (
        {},
        lambda x: x.astype(jnp.complex64),
        r"made for real input.*dtype=jnp.complex64",
    ),
    "real": (COMPLEX, lambda x: x, r"made for complex input.*x.astype\(jnp.complex64\)"),
    "no values": ({}, lambda x: x[:, :0], "hold 0 examples: 0 values per channel"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_x(name):
    arguments, spoil, message = CALLS[name]
    layer, state = make(3, "batch", approach="batch", **arguments)
    right = X.astype(jnp.complex64) if arguments else X

    def fail_then_succeed(x, state):
        # Caught inside the vmap, so that vmap has made no copy of the state.
        with pytest.raises((ValueError, TypeError), match=message):
            layer(spoil(x.real if arguments else x), state)
        return layer(x, state)

    y, after = over_batch(fail_then_succeed)(right, copy(state))
    expected, _ = call(layer, state, right)
    np.testing.assert_allclose(y, expected, atol=1e-6)
    assert after.get(layer.accepted_index) == 1


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((6, 3), r"mask has shape \(3,\).*\(3, 2\).*shape \(\),.*shape \(2,\)"),
        ((6, 1, 2), r"mask has shape \(1, 2\).*\(3, 2\).*shape \(\),.*shape \(2,\)"),
        ((6, 3, 2), r"mask has shape \(3, 2\).*\(3, 2\).*the channels share it"),
    ],
    ids=["length", "axes", "channels"],
)
@pytest.mark.parametrize("inference", [False, True], ids=["training", "inference"])
def test_a_wrong_mask(shape, message, inference):
    layer, state = make(3, "batch", approach="batch", inference=inference)

    def fail_then_succeed(x, state, mask):
        with pytest.raises(ValueError, match=message):
            layer(x, state, mask=mask)
        return layer(x, state)

    y, _ = masked(fail_then_succeed)(X, np.ones(shape, bool), copy(state))
    np.testing.assert_allclose(y, call(layer, state, X)[0], atol=1e-6)


def test_unbound_axis_name():
    layer, state = make(3, "batch", approach="batch")
    message = "The axis name 'batch' is not bound.*\n.*jax.vmap.*axis_name='batch'"
    with pytest.raises(NameError, match=message):
        layer(X[0], state)
    with pytest.raises(NameError, match=message):
        jax.vmap(layer, in_axes=(0, None), out_axes=(0, None))(X, state)
    with pytest.raises(NameError, match=message):
        over_batch(layer, "another")(X, state)
    assert_usable(layer, state)


def test_a_state_that_belongs_to_another_model():
    layer, state = make(3, "batch", approach="batch")
    other, other_state = eqx.nn.make_with_state(
        lambda: eqx.nn.Sequential([BatchNorm(3, "batch", approach="batch")])
    )()
    with pytest.raises(ValueError, match="made for another model.*make_with_state"):
        over_batch(layer)(X, other_state)
    assert_usable(layer, state)
    assert_usable(other, other_state)


@pytest.mark.parametrize(
    "other", [{"input_size": 4}, {"approach": Cumulative()}], ids=["channels", "approach"]
)
def test_a_state_that_belongs_to_another_layer(other):
    """`make_with_state` gives both states the same key, so their form has to be looked at."""
    layer, state = make(3, "batch", approach="batch")
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
    message = r"x has shape \(3,.*1 values per channel.*n = 1.*unbiased=False"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(over_batch(layer), jnp.ones(shape), copy(state))  # at trace time
    assert_usable(layer, state)


# In the tests the annotations are checked and speak first, so look at what a user sees, in a
# process of its own.
WRONG_TYPES = """
import equinox as eqx, jax, numpy as np
from eqx_norm import BatchNorm, strategies

for arguments in (
    dict(approach=strategies.Ema), dict(approach=3), dict(input_size=3.0),
    dict(implementation="cuda"),
):
    try:
        BatchNorm(**{"input_size": 3, "axis_name": "b", "approach": "batch", **arguments})
    except ValueError as error:
        print(error)

layer, state = eqx.nn.make_with_state(BatchNorm)(3, "batch", approach="batch")

def fail_then_succeed(x, mask, state):
    try:
        layer(x, state, mask=mask)
    except TypeError as error:
        print(error)
    return layer(x, state)

axes = dict(in_axes=(0, 0, None), out_axes=(0, None))
for dtype in (np.float32, np.int32):
    mask = np.ones((6, 5), dtype)
    _, state = jax.vmap(fail_then_succeed, axis_name="batch", **axes)(
        np.ones((6, 3, 5), np.float32), mask, state
    )
"""


@pytest.mark.x32
def test_arguments_of_a_wrong_type():
    one, two, three, four, *masks = python("-c", WRONG_TYPES).stdout.splitlines()
    assert "Ema" in one
    assert "with the parentheses" in one
    assert "approach=3 is neither a name nor a strategy" in two
    assert "input_size=3.0: it is the number of channels, an int" in three
    assert "implementation='cuda' is not available. Available are 'auto', 'xla'" in four
    for line, dtype in zip(masks, ("float32", "int32"), strict=True):
        assert line.startswith(f"mask has dtype {dtype}")
        assert "give booleans, for example mask > 0" in line
