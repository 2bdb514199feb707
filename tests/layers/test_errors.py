"""Tests that errors quote what was written, what it breaks and the fix, and keep the state."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from eqx_norm import BatchNorm, GroupNorm, InstanceNorm, LayerNorm, _approach
from eqx_norm.strategies import NAMED, Batch, Ema, VarianceClip
from tests.helpers import Cumulative, cast, copy, make, normal, over_batch
from tests.helpers import quick_call as call
from tests.processes import ROOT, python

X = normal(0, (6, 3, 2))


@pytest.fixture
def unchecked(monkeypatch):
    """Turns the checks of annotations off: users have none, and here they would speak first."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


# --- Of the constructors.

of_batch_norm = functools.partial(BatchNorm, input_size=3, axis_name="batch")
of_layer_norm = functools.partial(LayerNorm, shape=3)
ARGUMENTS = [
    ({"approach": "batches"}, "approach='batches' is not known.*'ema', 'batch', 'adam'"),
    ({"approach": Ema}, "Ema.*with the parentheses"),
    ({"approach": 3}, "approach=3 is neither a name nor a strategy"),
    ({"momentum": 1.0}, "momentum=1.0.*strictly between 0 and 1"),
    ({"approach": Ema(), "momentum": 0.9}, "=0.9 was given beside .*Ema.*to the strategy"),
    ({"mode": "adam"}, "mode='adam' is neither 'ema' nor 'batch'.*approach="),
    ({"mode": "ema", "approach": "batch"}, "mode='ema' and approach='batch'.*Leave one of"),
    ({"mode": "ema", "approach": Ema(0.9)}, r"approach=Ema\(momentum=0.9\).*Leave one of"),
    ({"input_size": 0}, "input_size=0.*an int of 1 or more"),
    ({"input_size": 3.0}, "input_size=3.0: it is the number of channels, an int"),
    ({"implementation": "cuda"}, "'cuda' is not available.*are 'auto', 'xla'"),
    ({"dtype": jnp.int32}, "dtype=int32.*a float or complex dtype"),
    ({"axis_name": ("b", "b")}, r"axis_name=\('b', 'b'\) names 'b' more than once"),
    (
        {"memory_axis_name": ["g", "h", "g"]},
        r"memory_axis_name=\('g', 'h', 'g'\) names 'g' more than once.*Give each name once",
    ),
    *(
        ({"eps": eps}, f"eps={eps}.*at least 1e-20")
        for eps in (0.0, -1e-5, 9e-21, float("nan"))
    ),
]
OF_LAYER_NORM = [
    ({"eps": 0.0}, "eps=0.0.*at least 1e-20"),
    ({"dtype": jnp.int32}, "dtype=int32.*float"),
    ({"implementation": "cuda"}, "'cuda' is not available.*are 'auto', 'xla'"),
    ({"shape": 0}, "shape=0.*1 or more"),
    ({"shape": (3, -1)}, r"shape=\(3, -1\)"),
    ({"shape": 4.0}, "shape=4.0: it must be the shape"),
]


@pytest.mark.parametrize(
    ("layer", "arguments", "message"),
    [
        *((of_batch_norm, *row) for row in ARGUMENTS),
        *((of_layer_norm, *row) for row in OF_LAYER_NORM),
        (GroupNorm, {"groups": 2.0, "channels": 4}, "groups=2.0: it must be an int"),
        (InstanceNorm, {"channels": "6"}, "groups='6': it must be an int"),
    ],
    ids=lambda value: "" if callable(value) else str(value),
)
def test_arguments(layer, arguments, message, unchecked):
    if layer is of_batch_norm and "mode" not in arguments:
        arguments = {"approach": "batch", **arguments}
    with pytest.raises(ValueError, match=message):
        layer(**arguments)


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
    """It is no reason for the warning, which would be an error here."""
    _approach._warn_of_the_default.cache_clear()
    assert BatchNorm(3, "batch", mode=name).approach == strategy(0.99)
    assert BatchNorm(3, "batch", momentum=0.8, mode=name, approach=name).momentum == 0.8
    by_position = (3, "batch", 1e-5, True, 0.9, False, None, name)
    assert BatchNorm(*by_position).approach == strategy(0.9)
    assert eqx.nn.BatchNorm(*by_position).mode == name


def test_without_an_approach_it_warns_once_and_takes_batch():
    _approach._warn_of_the_default.cache_clear()
    with pytest.warns(UserWarning, match="uses approach='batch'.*mode='ema'.*issues/659"):
        layer = BatchNorm(3, "batch")
    assert layer.approach == Batch(0.99)
    BatchNorm(3, "batch")  # a second warning would be an error here


# In a process of its own: where annotations are checked, there are frames in between. A comment
# marks each line that a warning has to point to.
WARNED = """
import functools, warnings
import equinox as eqx, jax
from eqx_norm import BatchNorm, _approach

class Model(eqx.Module):
    norm: BatchNorm
    def __init__(self):
        self.norm = BatchNorm(3, "b")  # Model

def build():
    return eqx.nn.Sequential([BatchNorm(3, "b")])  # build

for make in (
    lambda: BatchNorm(3, "b"),  # the layer
    lambda: eqx.nn.make_with_state(Model)(),
    eqx.filter_vmap(eqx.nn.make_with_state(build), axis_size=2),
    lambda: jax.tree.map(functools.partial(BatchNorm, axis_name="b"), [3, 4]),  # tree.map
):
    _approach._warn_of_the_default.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make()
    print(*[f"{warned.filename}:{warned.lineno}" for warned in caught])
"""


@pytest.mark.x32  # a process, which has no dtypes to look at
def test_the_warning_points_to_the_user_s_line(tmp_path):
    path = tmp_path / "model.py"
    path.write_text(WARNED)
    run = python(path, PYTHONPATH=str(ROOT))
    lines = dict(enumerate(WARNED.splitlines(), 1))
    found = [place.rpartition(":") for place in run.stdout.splitlines()]
    assert {file for file, *_ in found} == {str(path)}
    places = ["the layer", "Model", "build", "tree.map"]
    assert [lines[int(line)].partition("# ")[2] for *_, line in found] == places


# --- Of calls. The state was not touched, so that the right call after it succeeds.


single = functools.partial(make, axis_name="batch", approach="batch")
in_a_model = eqx.nn.make_with_state(
    lambda: eqx.nn.Sequential([BatchNorm(3, "batch", approach="batch")])
)
FITS = r"\(3, 2\).*shape \(\),.*shape \(2,\).*the channels share it"
ANOTHER = ValueError("belongs to another layer.*input_size=3")
STACKED = jax.tree.map(lambda leaf: jnp.stack([leaf] * 6), single(3)[1])
complex_layer, complex_state = single(3, dtype=jnp.complex64)
# What is given beside, or instead of, x of shape (3, 2) and its state; the error, and words.
CALLS = [
    ({"x": jnp.ones((4, 2))}, ValueError(r"\(4, 2\).*input_size=3.*channels of its input")),
    ({"x": jnp.ones((4, 3))}, ValueError(r"\(4, 3\).*This looks like a batch.*jax.vmap")),
    ({"x": jnp.ones((3, 2), bool)}, TypeError(r"dtype bool.*x.astype\(jnp.float32\)")),
    ({"x": jnp.ones((3, 2), jnp.complex64)}, TypeError("real input.*dtype=jnp.complex64")),
    (
        {"layer": complex_layer, "state": complex_state},
        TypeError(r"made for complex input.*x.astype\(jnp.complex64\)"),
    ),
    ({"mask": np.ones(3, bool)}, ValueError(rf"mask has shape \(3,\).*{FITS}")),
    ({"mask": np.ones((1, 2), bool)}, ValueError(rf"mask has shape \(1, 2\).*{FITS}")),
    ({"mask": np.ones(2, np.float32)}, TypeError("dtype float32.*give booleans.*mask > 0")),
    ({"state": in_a_model()[1]}, ValueError("made for another model.*make_with_state")),
    # `make_with_state` gives both states the same key, so their form has to be looked at.
    ({"state": single(4)[1]}, ANOTHER),
    ({"state": STACKED}, ValueError(r"one more axis.*without out_axes=\(0, None\)")),
    ({"state": make(3, "batch", approach=Cumulative())[1]}, ANOTHER),
    *(
        (
            {"state": cast(single(3)[1], dtype)},
            ValueError(
                f"holds {dtype}, but this layer remembers float.*leave its state as it is:.*"
                rf"model = .*astype\('{dtype}'\).*state = .*astype\('float\d\d'\)"
            ),
        )
        for dtype in ("bfloat16", "float16")
    ),
]
IN_TRAINING = [
    ({"x": jnp.ones((3, 0))}, ValueError("hold 0 examples: 0 values per channel")),
    (
        {"layer": make(3, "another", approach="batch")[0]},
        NameError("axis name 'another' is not bound.*jax.vmap.*axis_name='another'"),
    ),
]


@pytest.mark.parametrize(
    ("given", "error", "inference"),
    [*((*row, False) for row in CALLS + IN_TRAINING), *((*row, True) for row in CALLS)],
    ids=lambda value: "" if isinstance(value, dict) else str(value),
)
def test_calls(given, error, inference, unchecked):
    layer, state = single(3, inference=inference)

    def fail_then_succeed(x, state):
        arguments = {"layer": layer, "x": x, "state": state} | given
        wrong = eqx.nn.inference_mode(arguments.pop("layer"), inference)
        # Caught inside the vmap, so that vmap has made no copy of the state.
        with pytest.raises(type(error), match=f"(?s){error}"):
            wrong(**arguments)
        return layer(x, state)

    y, after = over_batch(fail_then_succeed)(X, copy(state))
    np.testing.assert_allclose(y, call(layer, state, X)[0], atol=1e-6)
    assert after.get(layer.memory_index).accepted == int(not inference)


@pytest.mark.parametrize("shape", [(1, 3), (1, 3, 1)], ids=str)
def test_unbiased_variance_of_one_value(shape):
    layer, state = single(3, unbiased=True)
    message = r"x has shape \(3,.*1 values per channel.*n = 1.*unbiased=False"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(over_batch(layer), jnp.ones(shape), copy(state))  # at trace time
    call(layer, state, X)


@pytest.mark.parametrize(
    ("shape", "x", "error"),
    [
        ((4,), jnp.ones(5), ValueError(r"\(5,\).*shape=\(4,\).*Make the layer with the shape")),
        ((3, 4), jnp.ones((4, 3)), ValueError(r"x has shape \(4, 3\).*shape=\(3, 4\)")),
        ((4,), jnp.ones((5, 3, 4)), ValueError(r"jax.vmap\(jax.vmap\(layer\)\)\(x\)")),
        ((), jnp.ones(3), ValueError(r"\(3,\).*shape=\(\).*jax.vmap\(layer\)\(x\)")),
        ((3,), jnp.arange(3), TypeError(r"x has dtype int\d\d.*x.astype")),
    ],
    ids=lambda value: str(getattr(value, "shape", value)),
)
def test_calls_of_layer_norm(shape, x, error):
    """They fail before any computation: https://github.com/Oneflow-Inc/oneflow/issues/6149."""
    layer = LayerNorm(shape)

    def traced(x):
        with pytest.raises(type(error), match=str(error)):
            layer(x)
        return x

    assert not jax.make_jaxpr(traced)(x).eqns


def test_an_activation_that_is_not_elementwise():
    activation = eqx.nn.Linear(4, 2, key=jax.random.key(0))
    message = r"(?s)activation=.*must be elementwise: given an array of shape \(3, 4\)"
    with pytest.raises(ValueError, match=message):
        LayerNorm((3, 4), activation=activation)(jnp.ones((3, 4)))
