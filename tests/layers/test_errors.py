"""Tests that errors quote the argument, the broken rule and the fix, and keep the state."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import BatchNorm, GroupNorm, InstanceNorm, LayerNorm, RMSNorm
from eqx_norm.strategies import NAMED, Batch, Ema, Frozen, Renorm, VarianceClip
from tests.helpers import Cumulative, cast, make, normal, over_batch, random_layer
from tests.layers.norms import with_parameters
from tests.processes import ROOT, python

UNOPTIMISED = True  # compares values: tests/compiling.py

X = normal(0, (6, 3, 2))


# --- Errors of constructors and functions.


def batch_norm(input_size=3, axis_name="batch", **options):
    if "mode" not in options:
        options = {"approach": "batch", **options}
    return BatchNorm(input_size, axis_name, **options)


layer_norm = partial(LayerNorm, shape=3)
UNAVAILABLE = "'cuda' is not available.*are 'auto', 'xla'"


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (batch_norm, {"approach": "batches"}, "='batches' is not known.*'ema', 'batch', 'ad"),
        (batch_norm, {"mode": "train"}, "='train' is not known"),
        (batch_norm, {"approach": Ema}, "Ema.*with the parentheses"),
        (batch_norm, {"approach": 3}, "approach=3 is neither a name nor a strategy"),
        (batch_norm, {"approach": Ema(), "momentum": 0.9}, "=0.9 was given beside .*Ema"),
        (batch_norm, {"mode": "ema", "approach": "batch"}, "mode='ema' and .*Leave one of"),
        (batch_norm, {"input_size": 0}, "input_size=0: a size must be an int of 1 or more"),
        (batch_norm, {"implementation": "cuda"}, UNAVAILABLE),
        (batch_norm, {"eps": 9e-21}, "eps=9e-21.*at least 1e-20"),
        (batch_norm, {"axis_name": {"b"}}, "axis_name={'b'} and.*{'b'} is no name.*='batch'"),
        (batch_norm, {"axis_name": iter("b")}, "iterator.* is no name of an axis.*='batch'"),
        (batch_norm, {"axis_name": ("b", "b")}, "name 'b' more than once.*each name once"),
        (batch_norm, {"memory_axis_name": ["a", "batch"]}, "'batch' more than once.*separate"),
        (batch_norm, {"dtype": bool}, "dtype=bool: .*float or complex.*dtype=jnp.float32"),
        (layer_norm, {"dtype": jnp.int32}, "dtype=int32: .*gradients.*dtype=jnp.float32"),
        (layer_norm, {"axis_name": ["a", "a"]}, r"^axis_name=.* name 'a' more than.*once\.$"),
        (InstanceNorm, {"channels": 4, "axis_name": None}, "^axis_name=None: None is no name"),
        (layer_norm, {"eps": float("inf")}, "eps=inf.*must be a finite number"),
        (layer_norm, {"implementation": "cuda"}, UNAVAILABLE),
        (layer_norm, {"weight_offset": np.inf}, "^weight_offset=inf"),
        (layer_norm, {"shape": (3, -1)}, r"shape=\(3, -1\): a size must"),
        (RMSNorm, {"shape": (2, 0)}, r"shape=\(2, 0\): a size must"),
        (GroupNorm, {"groups": 2.0, "channels": 4}, "groups=2.0: a size must be an int"),
        (GroupNorm, {"groups": 4, "channels": 6}, "groups=4 and channels=6.*multiple"),
        (GroupNorm, {"groups": 2}, "channels=None.*channelwise_affine=False"),
        (InstanceNorm, {"channels": 0}, "channels=0"),
        (InstanceNorm, {"channels": 4, "eps": True}, "eps=True.*must be a finite number"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_constructors_refuse_wrong_arguments(function, arguments, message, unchecked):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        function(**arguments)


def test_approach_name_makes_the_strategy_with_the_layer_s_momentum():
    """Also tests Equinox's `mode`, by position and by keyword, as the approach of its name."""
    for name, make_strategy in NAMED.items():
        by_name = BatchNorm(3, "batch", momentum=0.8, approach=name)
        as_object = BatchNorm(3, "batch", approach=make_strategy(0.8))
        assert by_name.approach == as_object.approach
        assert BatchNorm(3, "batch", approach=name).approach == make_strategy(0.99)
        assert by_name.momentum == as_object.momentum == 0.8
    assert BatchNorm(3, "batch", approach=VarianceClip(Ema(0.7))).momentum == 0.7
    assert BatchNorm(3, "batch", approach=VarianceClip(Cumulative())).momentum is None
    for mode, strategy in (("batch", Batch), ("ema", Ema)):
        by_position = (3, "batch", 1e-5, True, 0.9, False, None, mode)
        assert BatchNorm(*by_position).approach == strategy(0.9)
        assert BatchNorm(3, "batch", mode=mode).approach == strategy(0.99)
        assert BatchNorm(3, "batch", momentum=0.8, mode=mode, approach=mode).momentum == 0.8


@pytest.mark.x32  # runs a process of its own
def test_warnings_come_once_and_point_to_the_user_s_line():
    """Tests the warnings of a missing approach, and of one value per channel or group:
    https://github.com/ml-explore/mlx/issues/3653,
    https://github.com/pytorch/pytorch/issues/19250."""
    # In a process of its own: the check of annotations would add stack frames.
    path = ROOT / "tests" / "layers" / "warned.py"
    caught = python(path, PYTHONPATH=str(ROOT)).stdout.splitlines()
    lines = path.read_text().splitlines()
    words = ("uses approach='batch'", "mode='ema'", "issues/659")
    others = ("x of shape (3,) and axis_name='b' hold one value", "or GroupNorm")
    groups = ("x of shape (8, 1) and axis_name=() hold one value per group", "fewer groups")
    expectations = {"first": words, "second": others, "third": groups}
    for warning, (nth, expected) in zip(caught, expectations.items(), strict=True):
        file, line, message = warning.split("|")
        assert file == str(path)
        assert lines[int(line) - 1].endswith(f"# the user's {nth} line")
        assert all(part in message for part in expected)


@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
@pytest.mark.parametrize(
    "setting", [lambda m: batch_norm(momentum=m), lambda eps: layer_norm(eps=eps)]
)
def test_a_setting_that_is_an_array_says_what_settings_are(setting, unchecked):
    with pytest.raises(ValueError, match="is an array.*a Python number, and make one model"):
        eqx.filter_vmap(setting)(jnp.array([0.9, 0.99]))


# --- Errors of calls. The state stays valid: a right call after the error succeeds.


single = partial(make, axis_name="batch", approach="batch")
in_a_model = eqx.nn.make_with_state(
    lambda: eqx.nn.Sequential([BatchNorm(3, "batch", approach="batch")])
)
STACKED = jax.tree.map(lambda leaf: jnp.stack([leaf] * 6), single(3)[1])
ENSEMBLE = jax.tree.map(lambda leaf: jnp.stack([leaf] * 6), single(3))
ENSEMBLE = dict(zip(("layer", "state"), ENSEMBLE, strict=True))
COMPLEX = dict(zip(("layer", "state"), single(3, dtype=jnp.complex64), strict=True))
of_values = with_parameters(single(3)[0], jnp.ones((3, 2)), jnp.zeros(3))
CAST = (
    r"holds bfloat16, but this layer remembers float.*leave its state as it is, "
    r"model = .*astype\('bfloat16'\).*state = .*astype\(b.dtype\)"
)
AVERAGED = jax.tree.map(lambda a: a.astype(float), single(3)[1])
OTHER_X64 = not jax.config.read("jax_enable_x64")
with jax.enable_x64(OTHER_X64):
    OTHER_STATE = single(3)[1]
# Arguments that replace or complete x of shape (3, 2) and its state; the error, and its words.
CALLS = [
    ({"x": jnp.ones((4, 2))}, ValueError(r"\(4, 2\).*input_size=3.*the input_size= of its")),
    ({"x": jnp.ones((4, 3))}, ValueError(r"\(4, 3\).*This looks like a batch.*jax.vmap")),
    ({"x": jnp.ones((4, 5, 3))}, ValueError(r"channels are last.*moveaxis\(x, -1, 0\)")),
    ({"x": (jnp.ones((3, 2)), None)}, TypeError(r"x is a tuple of 2.*y, state = layer\(x")),
    ({"x": "abc"}, TypeError("x is 'abc', and must be one array")),
    ({"x": jnp.ones((3, 2), bool)}, TypeError(r"dtype bool.*x.astype\(jnp.float32\)")),
    ({"x": jnp.ones((3, 2), jnp.complex64)}, TypeError("real input.*dtype=jnp.complex64")),
    (COMPLEX, TypeError(r"made for complex input.*x.astype\(jnp.complex64\)")),
    ({"mask": np.ones(3, bool)}, ValueError(r"mask has .*\(3,\).*\(3, 2\).*channels share it")),
    ({"layer": of_values}, ValueError(r"own weight .*\(3, 2\), but .* the shape \(3,\)")),
    ({"mask": np.ones(2, np.float32)}, TypeError("dtype float32.*give booleans.*mask > 0")),
    ({"state": None}, ValueError("state=None is no eqx.nn.State.*make_with_state")),
    ({"state": in_a_model()[1]}, ValueError("made for another model.*make_with_state")),
    # `make_with_state` gives both states the same key; only the shapes of leaves differ.
    ({"state": single(4)[1]}, ValueError("belongs to another layer.*input_size=3")),
    (ENSEMBLE, ValueError(r"stacked, as in an ensemble.*eqx.filter_vmap.*leaf\[i\]")),
    ({"state": STACKED}, ValueError(r"one more axis.*without out_axes=\(0, None\)")),
    ({"state": cast(single(3)[1], "bfloat16")}, ValueError(CAST)),
    ({"state": AVERAGED}, ValueError(r"holds float\d\d, but.* counts in int32.*only the")),
    ({"state": OTHER_STATE}, ValueError(f"'jax_enable_x64', {OTHER_X64}.*state = jax.tree")),
]
OTHER_NAME, _ = make(3, "another", approach="batch")
GROUPED, _ = make(3, "batch", approach="batch", memory_axis_name="group")
SEVERAL, _ = make(3, ("row", "column"), approach="batch")
OF_GROUPS = (
    r"'group' is not bound.*memory_axis_name=.*vmap\(jax.vmap\(model, axis_name='batch'"
    r".*group'.*reconfigure\(model, state, memory_axis_name=\(\)\)"
)
IN_TRAINING = [
    ({"layer": OTHER_NAME}, NameError("'another' is not bound.*vmap.*axis_name='another'")),
    (
        {"layer": OTHER_NAME, "inference": jnp.array(True)},  # as jax.jit(model) traces it
        NameError("'another' is not bound.*is a traced value.*filter_jit, or close over"),
    ),
    ({"layer": SEVERAL}, NameError(r"'row' is not.*vmap\(jax.vmap\(model, .*='row'.*binds")),
    ({"layer": GROUPED}, NameError(OF_GROUPS)),
]


@pytest.mark.parametrize(
    ("arguments", "error", "inference"),
    [*((*row, False) for row in CALLS + IN_TRAINING), *((*row, True) for row in CALLS)],
    ids=lambda value: str(value) if isinstance(value, Exception | bool) else "",
)
def test_batch_norm_calls_refuse_wrong_arguments(arguments, error, inference, unchecked):
    layer, state = single(3, inference=inference)

    def fail_then_succeed(x, state):
        wrong = {"layer": layer, "x": x, "state": state} | arguments
        wrong_layer = eqx.nn.inference_mode(wrong.pop("layer"), inference)
        # The error is caught inside the vmap, before vmap makes a copy of the state.
        with pytest.raises(type(error), match=f"(?s){error}"):
            wrong_layer(**wrong)
        return layer(x, state)

    jax.eval_shape(over_batch(fail_then_succeed), X, state)


def test_unbiased_variance_of_one_value_is_an_error():
    layer, state = single(3, unbiased=True)
    message = r"x of shape \(3,.*one value per channel.*n = 1.*unbiased=False"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(over_batch(layer), ONE, state)  # at trace time
    jax.eval_shape(over_batch(layer), X, state)  # the state is valid


# Warnings come at trace time, too. Calls that must not warn are tested, because pytest turns
# warnings into errors.
ONE = X[:1, :, :1]


@pytest.mark.parametrize(
    "approach", ["batch", "renorm", "variance_clip", Cumulative()], ids=str
)
def test_one_value_per_channel_warns_only_if_y_stays_the_bias(approach):
    layer, state = single(3, approach=approach)
    with pytest.warns(UserWarning, match="hold one value per channel") as caught:
        jax.eval_shape(over_batch(layer), ONE, state)
    assert len(caught) == 1
    for quiet in ({"mask": jnp.ones(1, bool)}, {"inference": jnp.array(False)}):
        jax.eval_shape(over_batch(partial(layer, **quiet)), ONE, state)
    for x in (X[:1], X[:, :, :1]):
        jax.eval_shape(over_batch(layer), x, state)


@pytest.mark.parametrize("approach", ["ema", Renorm(0.9, 3.0, 5.0), Frozen(Batch())], ids=str)
def test_one_value_per_channel_does_not_warn_if_y_depends_on_x(approach):
    layer, state = single(3, approach=approach)
    jax.eval_shape(over_batch(layer), ONE, state)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (LayerNorm(1, 0.1), (1,)),
        (LayerNorm(1, 0.1, axis=0), (1, 5)),
        (GroupNorm(8, 8, 0.1), (8,)),
        (InstanceNorm(8, 0.1), (8, 1, 1)),
    ],
)
def test_one_value_per_group_warns(layer, shape):
    x, dy = normal(0, (2, *shape))
    with pytest.warns(UserWarning, match="hold one value per group") as caught:
        y, dx = jax.value_and_grad(lambda x: (layer(x) * dy).sum())(x)
    assert len(caught) == 1
    assert y == 0
    assert not dx.any()
    jax.eval_shape(partial(layer, mask=True), x)


def test_several_values_per_group_do_not_warn():
    parts = jax.vmap(LayerNorm(1, axis_name="a"), axis_name="a")
    for layer, shape in ((RMSNorm(1), (1,)), (GroupNorm(4, 8), (8,)), (parts, (2, 1))):
        jax.eval_shape(layer, jnp.ones(shape))


def masked(layer, *shape):
    return partial(layer, mask=jnp.ones(shape, bool))


def with_own(layer, weight=(), bias=()):
    return with_parameters(layer, jnp.ones(weight), jnp.zeros(bias))


TOKENS, layer, group = LayerNorm((4, 4)), LayerNorm(6), GroupNorm(2, 6)
EACH = r"jax.vmap\(lambda x, mask: layer\(x, mask=mask\)\)\(x, mask\)"
BY_TOKEN = r"jnp.broadcast_to\(mask\[:, None\], x.shape\)"
PARTS = GroupNorm(2, 6, axis_name="parts")
kernel = jax.vmap(RMSNorm(4, axis_name="a", implementation="pallas"), axis_name="a")
linear = LayerNorm((3, 4), activation=random_layer(eqx.nn.Linear, 4, 2))
NOT_A_STATE: Any = jnp.ones(4, bool)
no_state = partial(TOKENS, state=NOT_A_STATE)
short, of_batch = partial(layer, weight=jnp.ones(5)), partial(layer, bias=jnp.ones((4, 6)))
of_group = partial(group, weight=jnp.ones(2))
of_columns = partial(group, weight=jnp.ones((6, 1, 1)))
NOT_AN_ARRAY: Any = [1.0, 2.0]
of_list, of_floats = (lambda _: layer(NOT_AN_ARRAY)), partial(layer, mask=np.ones(6))
is_complex = partial(layer, bias=jnp.ones(6, jnp.complex64))


@pytest.mark.parametrize(
    ("layer", "shape", "error"),
    [
        (LayerNorm(4), (5,), ValueError(r"\(5,\).*shape=\(4,\).*the shape= of its")),
        (LayerNorm(4), (5, 3, 4), ValueError(r"jax.vmap\(jax.vmap\(layer\)\)\(x\)")),
        (lambda _: LayerNorm(3)(jnp.arange(3)), (3,), TypeError(r"x has dtype int.*x.astype")),
        (RMSNorm(6), (4, 6), ValueError(r"a batch.*jax\.vmap\(layer\)\(x\)")),
        (LayerNorm((2, 3)), (4, 2, 3), ValueError(r"a batch.*jax\.vmap\(layer\)\(x\)")),
        (group, (4, 6, 3), ValueError(r"\(4, 6, 3\).*looks like a batch")),
        (group, (), ValueError(r"shape \(\).*channels=6")),
        (GroupNorm(4, None, 1e-5, False), (6,), ValueError("groups=4 and channels=6")),
        (masked(group, 6), (6, 3), ValueError(rf"\(3,\); the ch.*{EACH}")),
        (masked(TOKENS, 4), (4, 4), ValueError(f"each value, .*{BY_TOKEN}.*{EACH}")),
        (masked(RMSNorm((6, 4)), 6), (6, 4), ValueError(rf"shape \(6, 4\): .*{BY_TOKEN}\.")),
        (masked(TOKENS, 2, 4, 4), (4, 4), ValueError(rf"Map over.*{EACH}")),
        (PARTS, (6, 3), NameError(r"'parts' is not.*jax.vmap\(layer, axis_name='parts'\)\(x")),
        (kernel, (2, 4), ValueError("cannot serve.*kernel merges .*Use implementation='au")),
        (no_state, (4, 4), ValueError(r"=bool\[4\] is no eqx.nn.State.*layer\(x, mask=mask\)")),
        (with_own(LayerNorm(4), 1, 4), (4,), ValueError(r"own weight .*\(1,\).*\(4,\)\.")),
        (with_own(RMSNorm(4), 4, (2, 4)), (4,), ValueError(r"own bias .*\(2, 4\).*tree_at")),
        (
            with_own(layer, (3, 6), (3, 6)),
            (6,),
            ValueError(r"stacked.*eqx.filter_vmap.*leaf\[i"),
        ),
        (masked(group, 6), (6,), ValueError(r"of shape \(\), which its channels share\.")),
        (of_columns, (6, 2, 2), ValueError(r"Write weight\.reshape\(\(6,\)\)")),
        (of_list, (2,), TypeError(r"x is \[1\.0, 2\.0\], .*write jnp\.asarray\(x\)")),
        (of_floats, (6,), TypeError("mask has dtype float64.*mask > 0")),
        (with_own(LayerNorm(4, axis=0), (4, 2), 4), (4, 2), ValueError("own weight")),
        (with_own(group, 2, 6), (6,), ValueError(r"own weight .*\(2,\).*\(6,\)")),
        (short, (6,), ValueError(r"weight= has shape \(5,\).*\(6,\)\.")),
        (of_batch, (6,), ValueError(r"bias= has shape \(4, 6\).*jax.vmap\(lambda x, bias")),
        (of_group, (6, 2), ValueError(r"weight= has shape \(2,\).*\(6,\) or \(6, 2\)\.")),
        (is_complex, (6,), TypeError("bias has dtype complex64")),
        (linear, (3, 4), ValueError(r"activation=.*elementwise: given .* of shape \(3, 4\)")),
    ],
    ids=lambda value: str(value) if isinstance(value, Exception) else "",
)
def test_example_norm_calls_refuse_wrong_arguments(layer, shape, error, unchecked):
    with pytest.raises(type(error), match=f"(?s){error}"):
        jax.eval_shape(layer, jnp.ones(shape))
