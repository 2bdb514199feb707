"""Tests `from_torch` and `to_torch` on dicts as PyTorch gives them, without PyTorch.

`test_torch_peers.py` compares with PyTorch itself.
"""

import inspect
import re
from typing import Any

import equinox as eqx
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import BatchNorm, LayerNorm, strategies
from eqx_norm.models import TorchReport, from_torch, to_torch
from eqx_norm.strategies import Average, Moments, VarianceClip
from tests.helpers import example, floats, make, over_batch, same
from tests.helpers import quick_call as call

C = 4
KEY = jax.random.key(0)
FLOAT = floats([]).dtype  # of statistics


def norm(**kwargs):
    return BatchNorm(C, "batch", **{"approach": "batch", **kwargs})


LAYERS = {
    "norm": norm,
    "norm without weights": lambda: norm(channelwise_affine=False),
    "norm with PReLU": lambda: norm(activation=eqx.nn.PReLU(jnp.full((C,), 0.25))),
    "layer norm": lambda: LayerNorm((2, 3)),
    "layer norm without bias": lambda: LayerNorm(C, use_bias=False),
    "layer norm without weights": lambda: LayerNorm(C, use_weight=False, use_bias=False),
    "group norm": lambda: eqx.nn.GroupNorm(2, C),
    "rms norm": lambda: eqx.nn.RMSNorm(C, use_bias=False),
    "linear": lambda: eqx.nn.Linear(3, 2, key=KEY),
    "linear to a scalar": lambda: eqx.nn.Linear(3, "scalar", use_bias=False, key=KEY),
    "embedding": lambda: eqx.nn.Embedding(5, 2, key=KEY),
    "convolution": lambda: eqx.nn.Conv1d(4, 6, 3, groups=2, key=KEY),
    "convolution without bias": lambda: eqx.nn.Conv2d(2, 3, (3, 2), use_bias=False, key=KEY),
    "transposed": lambda: eqx.nn.ConvTranspose2d(4, 6, (3, 2), groups=2, key=KEY),
    "transposed, 3d": lambda: eqx.nn.ConvTranspose3d(2, 1, 2, use_bias=False, key=KEY),
    "PReLU": eqx.nn.PReLU,
}


def built(form: Any) -> tuple[Any, eqx.nn.State]:
    """Returns a model of layers, given by their names in the structure of the form."""
    return eqx.nn.make_with_state(lambda: jax.tree.map(lambda name: LAYERS[name](), form))()


def filled(model: Any, state: eqx.nn.State, seed: int = 0) -> dict[str, np.ndarray]:
    """Returns the `state_dict` of such a model in PyTorch, of random numbers."""
    random = np.random.RandomState(seed)

    def of(name: str, array: np.ndarray) -> np.ndarray:
        if name.endswith("num_batches_tracked"):
            return np.array(random.randint(1000), np.int64)
        return random.uniform(0.5, 2, array.shape).astype(FLOAT)

    return {name: of(name, array) for name, array in to_torch(model, state).items()}


# --- What is loaded

forms = st.recursive(
    st.sampled_from(sorted(LAYERS)),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3)
        | st.dictionaries(
            st.sampled_from(["conv", "bn1", "a b"]), inner, min_size=1, max_size=2
        )
        | st.tuples(inner, inner)
    ),
    max_leaves=6,
)


@hypothesis.given(forms, st.booleans())
@hypothesis.settings(max_examples=30)
def test_there_and_back_is_the_same_to_the_bit(form, by_order):
    model, state = built(form)
    state_dict = filled(model, state)
    loaded, after, report = from_torch(model, state, state_dict, None if by_order else {})
    back = to_torch(loaded, after)
    assert back.keys() == state_dict.keys()
    for name, array in state_dict.items():
        assert back[name].dtype == array.dtype
        assert back[name].flags.writeable
        np.testing.assert_array_equal(back[name], array)
    assert report[1:] == ((), (), ())
    for tree, before in ((loaded, model), (after, state)):
        assert jax.tree.structure(tree) == jax.tree.structure(before)
    shapes = [[a.shape for a in jax.tree.leaves(m) if eqx.is_array(a)] for m in (model, loaded)]
    assert shapes[0] == shapes[1]


def test_by_order_is_the_order_within_each_kind():
    """The convolutions first here, and in turns there."""
    model, state = built([["convolution", "convolution"], ["norm", "norm"], "linear"])
    state_dict = filled(*built(["convolution", "norm", "convolution", "norm", "linear"]))
    loaded, _, report = from_torch(model, state, state_dict)
    assert report.matched == {
        "[0][0]": "0",
        "[0][1]": "2",
        "[1][0]": "1",
        "[1][1]": "3",
        "[2]": "4",
    }
    np.testing.assert_array_equal(loaded[0][1].weight, state_dict["2.weight"])
    np.testing.assert_array_equal(loaded[1][1].bias, state_dict["3.bias"])


@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_convolution_is_pytorch_s(groups):
    """There, x of channel i adds x * weight[i, o, k] to channel o at stride * t + dilation * k,
    less the padding."""
    stride, padding, dilation, output_padding = 3, 2, 2, 1
    layer = eqx.nn.ConvTranspose1d(
        4, 6, 3, stride, output_padding, padding, dilation, groups, key=KEY
    )
    random = np.random.RandomState(0)
    weight, bias = random.standard_normal((4, 6 // groups, 3)), random.standard_normal(6)
    x = random.standard_normal((4, 5))
    length = (5 - 1) * stride - 2 * padding + dilation * (3 - 1) + output_padding + 1
    y = np.zeros((6, length + 2 * padding)) + bias[:, None]
    for i, o, t, k in np.ndindex(4, 6 // groups, 5, 3):
        out = o + (i // (4 // groups)) * (6 // groups)
        y[out, stride * t + dilation * k] += x[i, t] * weight[i, o, k]
    layer, _, _ = from_torch(layer, None, {"weight": weight, "bias": bias})
    np.testing.assert_allclose(layer(floats(x)), y[:, padding : padding + length], atol=1e-5)


def test_arrays_keep_their_dtype_and_statistics_are_float32():
    model, state = eqx.nn.make_with_state(norm)(dtype=jnp.bfloat16)
    state_dict = {name: a.astype(np.float64) for name, a in filled(model, state).items()}
    model, state, _ = from_torch(model, state, state_dict)
    assert {a.dtype for a in (model.weight, model.bias) if a is not None} == {
        np.dtype(jnp.bfloat16)
    }
    assert state.get(model.memory_index).mean.dtype == FLOAT
    back = to_torch(model, state)
    assert back["weight"].dtype == np.float32  # PyTorch's NumPy has no bfloat16
    np.testing.assert_allclose(back["weight"], state_dict["weight"], rtol=2**-8)
    np.testing.assert_allclose(back["running_var"], state_dict["running_var"], rtol=1e-7)


class Tensor:
    """Stands in for a tensor, without PyTorch: NumPy does not take its bfloat16."""

    def __init__(self, array, half=False, asked=()):
        self.array, self.half, self.asked = array, half, asked

    def detach(self):
        return Tensor(self.array, self.half, (*self.asked, "detach"))

    def cpu(self):
        return Tensor(self.array, self.half, (*self.asked, "cpu"))

    def float(self):
        return Tensor(self.array, False, self.asked)

    def numpy(self):
        assert self.asked == ("detach", "cpu")
        if self.half:
            raise TypeError("Got unsupported ScalarType BFloat16")
        return self.array


@pytest.mark.parametrize("of", [Tensor, lambda a: Tensor(a, half=True), np.asarray, floats])
def test_tensors_of_any_kind(of):
    model, _ = built("linear")
    right = {"weight": np.full((2, 3), 0.5, FLOAT), "bias": np.arange(2, dtype=FLOAT)}
    model, _, _ = from_torch(model, None, {name: of(a) for name, a in right.items()})
    for name, array in right.items():
        np.testing.assert_array_equal(getattr(model, name), array)


def test_arrays_of_no_layer():
    class Model(eqx.Module):
        token: jax.Array
        fc: eqx.nn.Linear

    model = Model(jnp.zeros(3), eqx.nn.Linear(3, 2, key=KEY))
    fc = {"fc.weight": np.ones((2, 3)), "fc.bias": np.ones(2)}
    for name, names in (("token", None), ("token", {}), ("cls", {"token": "cls"})):
        loaded, _, report = from_torch(model, None, {name: np.arange(3.0), **fc}, names)
        np.testing.assert_array_equal(loaded.token, np.arange(3))
        assert report.matched["token"] == name
    with pytest.raises(ValueError, match=r"token +token +\(3,\) +\(1, 3\)"):
        from_torch(model, None, {"token": np.ones((1, 3)), **fc})
    assert set(to_torch(model)) == {"token", *fc}


@pytest.mark.parametrize("names", [None, {}])
def test_layers_and_weights_that_are_shared(names):
    """PyTorch's dict has them under both names; here they are in one place."""

    class Tied(eqx.Module):
        bn: eqx.nn.Shared
        words: eqx.nn.Shared

        def __init__(self):
            inner = norm()
            self.bn = eqx.nn.Shared((inner, inner), lambda t: t[1], lambda t: t[0])
            pair = eqx.nn.Embedding(5, 2, key=KEY), eqx.nn.Linear(2, 5, key=KEY)
            self.words = eqx.nn.Shared(pair, lambda t: t[1].weight, lambda t: t[0].weight)

    model, state = eqx.nn.make_with_state(Tied)()
    state_dict = filled(model, state)
    right = dict(state_dict)
    head = {name: state_dict.pop(name) for name in [*state_dict] if "words" in name}
    tied = {"words.pytree.1.weight": head["words.pytree.0.weight"]}
    loaded, after, report = from_torch(model, state, {**state_dict, **head, **tied}, names)
    assert report.matched["words.pytree[1]"] == "words.pytree.1"
    assert report[1:] == ((), (), ())
    np.testing.assert_array_equal(loaded.words()[1].weight, head["words.pytree.0.weight"])
    assert same(to_torch(loaded, after), right)


# --- Statistics


def statistics(**changed):
    return {
        "weight": np.ones(C),
        "bias": np.zeros(C),
        "running_mean": np.arange(C, dtype=float),
        "running_var": np.arange(1.0, C + 1),
        "num_batches_tracked": np.array(7),
    } | changed


@pytest.mark.parametrize("approach", strategies.NAMED)
def test_statistics_are_loaded_as_they_stand(approach):
    layer, state = make(C, "batch", approach=approach)
    layer, state, _ = from_torch(layer, state, statistics())
    used = layer.approach.infer(state.get(layer.memory_index))
    np.testing.assert_array_equal(used.mean, np.arange(C))
    np.testing.assert_array_equal(used.variance, np.arange(1, C + 1))
    assert int(state.get(layer.accepted_index)) == 7
    assert int(state.get(layer.rejected_index)) == 0


def test_the_number_of_batches_may_be_absent_or_too_large():
    layer, state = make(C, "batch", approach="batch")
    old = {n: a for n, a in statistics().items() if n != "num_batches_tracked"}
    for given, accepted in ((old, 0), (statistics(num_batches_tracked=np.array(2**40)), 2**31)):
        _, after, _ = from_torch(layer, state, given)
        assert int(after.get(layer.accepted_index)) == max(accepted - 1, 0)


def trained(layer, state, given, steps):
    """Returns what PyTorch would hold after so many batches, by its formulas, and what is."""
    momentum = layer.approach.momentum if hasattr(layer.approach, "momentum") else None
    layer, state, _ = from_torch(layer, state, given)
    mean, var = (given[name].astype(np.float64) for name in ("running_mean", "running_var"))
    random = np.random.RandomState(0)
    for k in range(int(given["num_batches_tracked"]) + 1, steps + 1):
        x = random.standard_normal((5, C, 3)) * np.arange(1, C + 1)[:, None] + 2
        _, state = call(layer, state, floats(x))
        share = 1 / k if momentum is None else 1 - momentum
        mean = (1 - share) * mean + share * x.mean((0, 2))
        var = (1 - share) * var + share * x.var((0, 2), ddof=1)
    right = {"running_mean": mean, "running_var": var, "num_batches_tracked": steps}
    return right, to_torch(layer, state)


@pytest.mark.parametrize("tracked", [0, 7])
@pytest.mark.parametrize(
    "approach",
    [strategies.Batch(0.9), Average(), VarianceClip(Average(), ratio=1e6)],
    ids=["a momentum", "the average", "the average, clipped"],
)
def test_training_goes_on_as_in_pytorch(approach, tracked):
    """An untrained layer's mean of 0 and variance of 1 count, too."""
    layer, state = make(C, "batch", approach=approach, unbiased=True)
    untrained = {"running_mean": np.zeros(C), "running_var": np.ones(C)} if not tracked else {}
    given = statistics(**untrained, num_batches_tracked=np.array(tracked))
    right, ours = trained(layer, state, given, tracked + 20)
    for name, value in right.items():
        # 20 roundings of x, of order 8, in the means; of their squares in the variances.
        np.testing.assert_allclose(ours[name], value, rtol=2e-5, atol=2e-5, err_msg=name)


def test_average_starts_as_the_identity_and_does_not_drift():
    layer, state = make(C, "batch", approach=Average())
    used = layer.approach.infer(state.get(layer.memory_index))
    assert (used.mean == 0).all()
    assert (used.variance == 1).all()
    random = np.random.RandomState(0)
    means = (100 + random.standard_normal((3000, C))).astype(FLOAT)
    variances = random.uniform(0.5, 2, (3000, C)).astype(FLOAT)

    @jax.jit
    def run(means, variances):
        def step(carry, batch):
            k, memory = carry
            batch = strategies.TrainingBatch(**vars(Moments.of(*batch)), eps=1e-5, step=k)
            return (k + 1, Average().update(batch, memory)[1]), None

        empty = Average().init(C, means.dtype)
        return jax.lax.scan(step, (jnp.int32(0), empty), (means, variances))[0][1]

    used = run(means, variances).moments
    # One rounding of the result: those of 3000 steps do not add up.
    ulp = float(np.finfo(FLOAT).eps)
    np.testing.assert_allclose(used.mean, means.astype(np.longdouble).mean(0), rtol=2 * ulp)
    np.testing.assert_allclose(
        used.variance, variances.astype(np.longdouble).mean(0), rtol=2 * ulp
    )


def test_the_state_given_stays_valid():
    layer, state = make(C, "batch", approach="batch")
    _, after, _ = from_torch(layer, state, statistics())
    assert (state.get(layer.memory_index).weight, after.get(layer.memory_index).weight) == (
        0,
        1,
    )
    state.set(layer.accepted_index, jnp.int32(1))  # not used up


# --- Names


def test_names():
    model, state = built({"stem": ["convolution", "norm"], "head": "linear"})
    state_dict = filled(model, state)
    renamed = {
        re.sub(r"^stem\.0", "features.conv", re.sub(r"^stem\.1", "features.bn", name)): array
        for name, array in state_dict.items()
    }
    right = to_torch(*from_torch(model, state, state_dict, {})[:2])
    parts = {"['stem'][0]": "features.conv", "stem.1": "features.bn"}
    matched = {"['head']": "head", "['stem'][0]": "features.conv", "['stem'][1]": "features.bn"}
    names = [parts, matched.get, {"": "", **parts}]
    for of in names:
        loaded, after, report = from_torch(model, state, renamed, of)
        assert report.matched == matched
        assert same(to_torch(loaded, after), right)
        assert to_torch(loaded, after, of).keys() == renamed.keys()
    module = {f"module.{name}": array for name, array in state_dict.items()}
    loaded, after, _ = from_torch(model, state, module, {"": "module"})
    assert same(to_torch(loaded, after), right)
    # A head of its own; the rest is loaded. What is there for it is not left over.
    other = {**module, "module.head.weight": np.ones((9, 9))}
    from_torch(model, state, other, {"": "module", "head": None})
    from_torch(model, state, renamed, {**parts, "head": None})
    renamed = {name: array for name, array in renamed.items() if "head" not in name}
    loaded, after, report = from_torch(model, state, renamed, {**parts, "head": None})
    assert report.skipped == ("['head']",)
    assert same(loaded["head"], model["head"])
    assert to_torch(loaded, after, {**parts, "head": None}).keys() == renamed.keys()
    assert str(report).splitlines() == [
        "['stem'][0]  <-  features.conv",
        "['stem'][1]  <-  features.bn",
        "left out by names: ['head']",
    ]


def test_the_longest_part_of_a_path_is_replaced():
    model, state = built([["linear"], ["linear"]])
    names = {"[0]": "a", "[0][0]": "b", "[1]": "c"}
    assert to_torch(model, state, names).keys() == {
        "b.weight",
        "b.bias",
        "c.0.weight",
        "c.0.bias",
    }


# --- Errors


def error(*args, **kwargs):
    with pytest.raises(ValueError) as raised:  # noqa: PT011 (the caller looks at it)
        from_torch(*args, **kwargs)
    return str(raised.value)


def test_all_that_does_not_fit_is_one_error():
    model, state = built(["convolution", "norm", "norm without weights", "linear", "PReLU"])
    before = jax.tree.leaves((model, state))
    state_dict = filled(model, state)
    state_dict["0.weight"] = np.ones((6, 2, 5))
    del state_dict["0.bias"], state_dict["1.running_var"], state_dict["4.weight"]
    state_dict["1.num_batches_tracked"] = np.ones(2)
    state_dict["2.bias"] = np.ones(C)
    state_dict["extra.weight"] = np.ones(3)
    said = error(model, state, state_dict, {})
    rows = [re.split(r"  +", line.strip()) for line in said.splitlines()]
    assert rows[1:8] == [
        ["here", "in the state_dict", "shape here, as PyTorch has it", "shape there"],
        ["[0]", "0.weight", "(6, 2, 3)", "(6, 2, 5)"],
        ["[0]", "0.bias", "(6,)", "-"],
        ["[1]", "1.running_var", "(4,)", "-"],
        ["[1]", "1.num_batches_tracked", "()", "(2,)"],
        ["[2]", "2.bias", "-", "(4,)"],
        ["Make the model with these arrays and shapes, or say by names= what is what."],
    ]
    assert rows[8:10] == [["only in the model: [4]"], ["only in the state_dict: extra.weight"]]
    assert "strict=False" in said
    assert "only in" not in error(model, state, state_dict, {}, strict=False)
    assert list(map(id, before)) == list(map(id, jax.tree.leaves((model, state))))


def test_not_strict():
    model, state = built(["convolution", "norm", "linear"])
    state_dict = filled(model, state)
    short = {name: a for name, a in state_dict.items() if not name.startswith("2")}
    short["other.weight"] = np.ones((2, 2))
    short["other.lower.weight"] = np.ones((2, 2))
    for names in ({}, None):
        said = error(model, state, short, names)
        assert "only in the model: [2]" in said
        uneven = (
            "not matched by their order: linear layers and embeddings, 1 in the model, 2 in"
        )
        assert (uneven in said) == (names is None)
        loaded, _, report = from_torch(model, state, short, names, strict=False)
        assert report == TorchReport(
            {"[0]": "0", "[1]": "1"}, (), ("[2]",), ("other.weight", "other.lower.weight")
        )
        assert same(loaded[2], model[2])
        np.testing.assert_array_equal(loaded[1].weight, state_dict["1.weight"])
        assert str(report).splitlines()[2:] == [
            "only in the model: [2]",
            "only in the state_dict: other.weight, other.lower.weight",
        ]


def test_entries_that_are_no_arrays():
    layer, state = make(C, "batch", approach="batch")
    assert "Give checkpoint['model']" in error(layer, state, {"model": {}})
    assert "'extra' in the state_dict is no array but 'x'" in error(
        layer, state, statistics(extra="x")
    )

    class Module:
        def state_dict(self):
            return statistics()

    unchecked = inspect.unwrap(from_torch)  # whose annotations are not checked, as for users
    with pytest.raises(ValueError, match=r"Give what its .state_dict\(\) returns"):
        unchecked(layer, state, Module())
    assert "imaginary" in error(layer, state, statistics(weight=np.ones(C, complex)))
    assert "imaginary" in error(layer, state, statistics(running_mean=np.ones(C, complex)))


def test_names_of_nothing():
    model, state = built(["linear"])
    said = error(model, state, filled(model, state), {"[9]": "a", "[0]": "0"})
    assert "names has ['[9]'], with which no path" in said
    assert "The paths are '[0]'." in said
    with pytest.raises(
        ValueError, match=r"'\[1\]' and another layer.*\['a.bias', 'a.weight'\]"
    ):
        to_torch(*built(["linear", "linear"]), lambda _: "a")


def test_models_that_cannot_be_translated():
    with pytest.warns(UserWarning, match="legacy|unspecified"):
        model, state = eqx.nn.make_with_state(lambda: [eqx.nn.BatchNorm(C, "batch")])()
    assert re.search(
        r"\['\[0\]'\] are layers of eqx.nn.BatchNorm.*swap", error(model, state, {})
    )
    layer, state = make(C, "batch", approach="batch")
    assert "give it, as eqx.nn.make_with_state" in error(layer, None, statistics())
    foreign = eqx.nn.make_with_state(lambda: [norm()])()[1]
    assert "made for another model" in error(layer, foreign, statistics())
    with pytest.raises(ValueError, match="made for another model"):
        to_torch(layer, foreign)


@pytest.mark.parametrize("kind", sorted(set(LAYERS) - {"layer norm without weights", "PReLU"}))
def test_ensembles_are_refused(kind):
    several, state = eqx.filter_vmap(
        lambda _: built([kind]), in_axes=0, out_axes=eqx.if_array(0)
    )(jnp.arange(3))
    state_dict = filled(*built([kind]))
    for refused in (
        lambda: from_torch(several, state, state_dict, {}),
        lambda: to_torch(several, state),
    ):
        with pytest.raises(ValueError, match=r"\['\[0\]'\] are several layers at once"):
            refused()


def test_an_approach_that_cannot_take_over_statistics():
    class Mine(strategies.AbstractStrategy[Moments]):
        def init(self, channels, dtype):
            return Moments.zero(channels, dtype)

        def update(self, batch, memory):
            return batch, memory.merge(batch)

        def infer(self, memory):
            return memory

    layer, state = make(C, "batch", approach=Mine())
    with pytest.raises(NotImplementedError, match=r"Mine cannot take over.*load"):
        from_torch(layer, state, statistics())
    assert (to_torch(layer, state)["running_var"] == 1).all()


def test_examples_in_the_docstrings():
    found = example(from_torch)
    assert found["report"].matched == {"": ""}
    assert str(found["report"]) == "(the layer itself)  <-  (the layer itself)"
    assert int(found["state"].get(found["norm"].accepted_index)) == 500
    assert (example(to_torch)["state_dict"]["running_var"] == 1).all()


def test_a_loaded_model_runs():
    layer, state = make(C, "batch", approach="batch")
    layer, state, _ = from_torch(layer, state, statistics())
    x = floats(np.random.RandomState(0).standard_normal((3, C, 2)))
    y, _ = over_batch(eqx.nn.inference_mode(layer))(x, state)
    right = np.asarray(x) - np.arange(C)[:, None]
    right = right / np.sqrt(np.arange(1, C + 1) + 1e-5)[:, None]
    np.testing.assert_allclose(y, right, rtol=1e-6, atol=1e-6)
