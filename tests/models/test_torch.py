"""Tests `from_torch` and `to_torch` on dicts as PyTorch gives them, without PyTorch.

`test_torch_peers.py` compares with PyTorch itself.
"""

import re
from types import SimpleNamespace
from typing import Any

import equinox as eqx
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import BatchNorm, LayerNorm, strategies
from eqx_norm.models import from_torch, to_torch
from eqx_norm.strategies import Accumulated, Average, Batch, VarianceClip
from tests.helpers import Cumulative as Unloaded
from tests.helpers import example, floats, make, same
from tests.helpers import quick_call as call
from tests.models.nested import KEY, unchecked

C, COUNT = 4, "num_batches_tracked"
FLOAT = floats([]).dtype  # of statistics


def norm(**kwargs):
    return BatchNorm(C, "batch", **{"approach": "batch", **kwargs})


def linear(out=2):
    return eqx.nn.Linear(3, out, key=KEY)


LAYERS: dict[str, Any] = {
    "norm": norm,
    "norm without weights": lambda: norm(channelwise_affine=False),
    "norm with PReLU": lambda: norm(activation=eqx.nn.PReLU(jnp.full((C,), 0.25))),
    "layer norm": lambda: LayerNorm((2, 3)),
    "layer norm without bias": lambda: eqx.nn.LayerNorm(C, use_bias=False),
    "layer norm without weights": lambda: LayerNorm(C, use_weight=False, use_bias=False),
    "group norm": lambda: eqx.nn.GroupNorm(2, C),
    "rms norm": lambda: eqx.nn.RMSNorm(C, use_bias=False),
    "linear": linear,
    "linear to a scalar": lambda: eqx.nn.Linear(3, "scalar", use_bias=False, key=KEY),
    "embedding": lambda: eqx.nn.Embedding(5, 2, key=KEY),
    "convolution": lambda: eqx.nn.Conv1d(4, 6, 3, groups=2, key=KEY),
    "convolution without bias": lambda: eqx.nn.Conv2d(2, 3, (3, 2), use_bias=False, key=KEY),
    "transposed": lambda: eqx.nn.ConvTranspose2d(4, 6, (3, 2), groups=2, key=KEY),
    "PReLU": eqx.nn.PReLU,
    "array": lambda: jnp.zeros((2, 3)),
}


def built(form: Any) -> tuple[Any, Any]:
    """Returns a model of layers, given by their names in the structure of the form."""
    return eqx.nn.make_with_state(lambda: jax.tree.map(lambda name: LAYERS[name](), form))()


def filled(model: Any, state: Any = None, seed: int = 0) -> dict[str, np.ndarray]:
    """Returns the `state_dict` of such a model in PyTorch, of random numbers."""
    random = np.random.RandomState(seed)

    def of(name: str, array: np.ndarray) -> np.ndarray:
        if name.endswith(COUNT):
            return np.array(random.randint(1000), np.int64)
        return random.uniform(0.5, 2, array.shape).astype(FLOAT)

    return {name: of(name, array) for name, array in to_torch(model, state).items()}


def error(*args: Any, **kwargs: Any) -> str:
    with unchecked(), pytest.raises(ValueError) as raised:  # noqa: PT011 (the caller looks)
        from_torch(*args, **kwargs)
    return str(raised.value)


def renamed(state_dict: Any, **names: str) -> dict[str, Any]:
    """Returns the dict with other names, by the regular expressions that they replace."""
    for new, old in names.items():
        state_dict = {re.sub(old, new, name): array for name, array in state_dict.items()}
    return state_dict


forms = st.recursive(
    st.sampled_from(sorted(LAYERS)),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3)
        | st.dictionaries(st.sampled_from(["conv", "bn1", "a b"]), inner, min_size=1)
        | st.tuples(inner, inner)
    ),
    max_leaves=6,
)


@hypothesis.given(forms)
@hypothesis.settings(max_examples=20)
def test_there_and_back_is_the_same_to_the_bit(form):
    model, state = built(form)
    state_dict = filled(model, state)
    before = jax.tree.leaves((model, state))
    loaded, after, report = from_torch(model, state, state_dict)
    back = to_torch(loaded, after)
    assert back.keys() == state_dict.keys()
    for name, array in state_dict.items():
        assert back[name].dtype == array.dtype
        assert back[name].flags.writeable
        np.testing.assert_array_equal(back[name], array)
    assert report[1:] == ((), (), ())
    assert jax.tree.structure((loaded, after)) == jax.tree.structure((model, state))
    now = jax.tree.leaves((loaded, after))
    assert list(map(jnp.shape, now)) == list(map(jnp.shape, before))
    assert same(before, jax.tree.leaves((model, state)))  # which stay valid


@pytest.mark.parametrize("groups", [1, 2])
def test_a_transposed_convolution_is_pytorch_s(groups):
    """There, x of channel i adds x * weight[i, o, k] to channel o at stride * t + dilation * k,
    less the padding."""
    stride, padding, dilation, more = 3, 2, 2, 1
    layer = eqx.nn.ConvTranspose1d(4, 6, 3, stride, more, padding, dilation, groups, key=KEY)
    random = np.random.RandomState(0)
    weight, bias = random.standard_normal((4, 6 // groups, 3)), random.standard_normal(6)
    x = random.standard_normal((4, 5))
    length = (5 - 1) * stride - 2 * padding + dilation * (3 - 1) + more + 1
    y = np.zeros((6, length + 2 * padding)) + bias[:, None]
    for i, o, t, k in np.ndindex(4, 6 // groups, 5, 3):
        out = o + (i // (4 // groups)) * (6 // groups)
        y[out, stride * t + dilation * k] += x[i, t] * weight[i, o, k]
    layer, _, _ = from_torch(layer, None, {"weight": weight, "bias": bias})
    np.testing.assert_allclose(layer(floats(x)), y[:, padding : padding + length], atol=1e-5)


def statistics(**changed):
    return {
        "weight": np.ones(C),
        "bias": np.zeros(C),
        "running_mean": np.arange(C, dtype=float),
        "running_var": np.arange(1.0, C + 1),
        COUNT: np.array(7),
    } | changed


@pytest.mark.parametrize("approach", [*strategies.NAMED, Accumulated(Average(), 3)], ids=str)
def test_statistics_are_loaded_as_they_stand(approach):
    given = statistics()
    without = {n: a for n, a in given.items() if n != COUNT}
    for changed, count in ((given, 7), (without, 0), (given | {COUNT: 2**40}, 2**31 - 1)):
        layer, state, _ = from_torch(*make(C, "batch", approach=approach), changed)
        used = layer.approach.infer(state.get(layer.memory_index))
        np.testing.assert_array_equal(used.mean, given["running_mean"])
        np.testing.assert_array_equal(used.variance, given["running_var"])
        assert int(state.get(layer.accepted_index)) == count


APPROACHES = [Batch(0.9), Average(), VarianceClip(Average(), 1e6), Accumulated(Average(), 2)]


@pytest.mark.parametrize("tracked", [0, 7])
@pytest.mark.parametrize("approach", APPROACHES, ids=str)
def test_training_goes_on_as_in_pytorch(approach, tracked):
    """An untrained layer's mean of 0 and variance of 1 count, too; so do batches that are
    accumulated, and not their parts."""
    untrained = {} if tracked else {"running_mean": np.zeros(C), "running_var": np.ones(C)}
    given = statistics(**untrained, **{COUNT: np.array(tracked)})
    layer, state = make(C, "batch", approach=approach, unbiased=True)
    layer, state, _ = from_torch(layer, state, given)
    mean, var = given["running_mean"], given["running_var"]
    random = np.random.RandomState(0)
    for k in range(tracked + 1, tracked + 11):
        x = random.standard_normal((6, C, 3)) * np.arange(1, C + 1)[:, None] + 2
        for part in np.split(x, getattr(approach, "every", 1)):
            _, state = call(layer, state, floats(part))
        share = 1 / k if layer.momentum is None else 1 - layer.momentum
        mean = (1 - share) * mean + share * x.mean((0, 2))
        var = (1 - share) * var + share * x.var((0, 2), ddof=1)
    right = {"running_mean": mean, "running_var": var, COUNT: tracked + 10}
    ours = to_torch(layer, state)
    for name, value in right.items():
        # 10 roundings of x, of order 8, in the means; of their squares in the variances.
        np.testing.assert_allclose(ours[name], value, rtol=2e-5, atol=2e-5, err_msg=name)


def test_names_that_coincide_go_before_the_order():
    model = {name: linear(3) for name in "qkv"}
    given = filled(model)
    shuffled = {n: given[n] for part in "kvq" for n in given if n.startswith(part)}
    assert same(to_torch(from_torch(model, None, shuffled)[0]), given)
    # Of which one has another name: it is what is left over.
    other = renamed(shuffled, query="^q")
    loaded, _, report = from_torch(model, None, other)
    assert report.matched == {"['k']": "k", "['q']": "query", "['v']": "v"}
    assert same(to_torch(loaded), given)


def test_the_rest_goes_by_order_among_layers_of_one_form_where_equally_many():
    """The convolutions first here, and in turns there."""
    model, state = built([["convolution", "convolution"], ["norm", "norm"], "linear"])
    there = [("c1", "convolution"), ("n1", "norm"), ("c2", "convolution"), ("n2", "norm")]
    given = dict[str, np.ndarray]()
    for seed, (name, kind) in enumerate([*there, ("fc", "linear")]):
        given |= {f"{name}.{n}": a for n, a in filled(*built(kind), seed=seed).items()}
    loaded, _, report = from_torch(model, state, given)
    assert [*report.matched.values()] == ["c1", "c2", "n1", "n2", "fc"]
    np.testing.assert_array_equal(loaded[0][1].weight, given["c2.weight"])
    np.testing.assert_array_equal(loaded[1][1].bias, given["n2.bias"])
    more = given | {f"c3.{n}": a for n, a in filled(*built("convolution")).items()}
    _, _, report = from_torch(model, state, more, strict=False)
    assert [*report.matched.values()] == ["n1", "n2", "fc"]
    assert "c3.weight" in report.unexpected


def test_names_that_are_given_decide():
    model, state = built({"stem": ["convolution", "norm"], "head": "linear"})
    given = filled(model, state)
    other = renamed(given, **{"features.conv": r"^stem\.0", "features.bn": r"^stem\.1"})
    parts = {"['stem'][0]": "features.conv", "stem.1": "features.bn"}
    matched = {"['head']": "head", "['stem'][0]": "features.conv", "['stem'][1]": "features.bn"}
    for names in (parts, matched.get, {"": "", **parts}):
        loaded, after, report = from_torch(model, state, other, names)
        assert report.matched == matched
        assert same(to_torch(loaded, after), given)
        assert to_torch(loaded, after, names).keys() == other.keys()
    module = {f"module.{name}": array for name, array in given.items()}
    loaded, after, _ = from_torch(model, state, module, {"": "module"})
    assert same(to_torch(loaded, after), given)
    longest = {"[0]": "a", "[0][0]": "b", "[1]": "c"}
    keys = to_torch(*built([["linear"], ["linear"]]), longest).keys()
    assert keys == {"b.weight", "b.bias", "c.0.weight", "c.0.bias"}


@pytest.mark.parametrize("stem", ["stem", "features"])
@pytest.mark.parametrize("head", ["head", "fc"])
def test_a_head_of_another_size_is_left_and_everything_else_is_loaded(stem, head):
    """Whether names coincide or not, and although a layer elsewhere has the head's form."""
    model, state = built({"stem": ["convolution", "norm", "linear"], "head": "linear"})
    given = filled(model, state)
    there = given | {"head.weight": np.ones((9, 3)), "head.bias": np.ones(9)}
    there = renamed(there, **{stem: "^stem", head: "^head"})
    loaded, after, report = from_torch(model, state, there, {"head": None}, strict=False)
    assert report.skipped == ("['head']",)
    assert report.unexpected == (() if head == "head" else ("fc.weight", "fc.bias"))
    assert same(loaded["head"], model["head"])
    right = {name: array for name, array in given.items() if "head" not in name}
    assert same(to_torch(loaded, after, {"head": None}), right)
    lines = str(report).splitlines()
    assert lines[0].split() == ["['stem'][0]", "<-", f"{stem}.0"]
    assert lines[3] == "left out by names: ['head']"
    if head == "head":
        from_torch(model, state, there, {"head": None})  # it is not left over


def test_what_names_leaves_out_is_loaded_into_no_other_layer():
    model = {"body": linear(), "head": linear()}
    head = {n: a for n, a in filled(model).items() if "head" in n}
    loaded, _, report = from_torch(model, None, head, {"head": None}, strict=False)
    assert (report.matched, same(loaded, model)) == ({}, True)


class Broken:
    """Is a sparse tensor, or one of the meta device."""

    def detach(self):
        raise NotImplementedError("it has no values")


def test_all_that_is_wrong_is_one_error_and_nothing_is_loaded():
    norms = {name: norm() for name in ("a", "b", "c")}
    model, state = eqx.nn.make_with_state(lambda: norms)()
    far = np.array([1.0, 1e300, 1, 1]) if np.float32 == FLOAT else np.full(C, np.inf)
    nan = np.array(np.nan)
    wrong = {
        "a": statistics(running_var=np.full(C, -4.0), **{COUNT: np.array(-5)}),
        "b": statistics(running_var=far, running_mean=np.full(C, np.nan), **{COUNT: nan}),
        "c": statistics(weight=np.ones(C, complex), running_mean=np.ones(C, complex)),
    }
    given: dict[Any, Any] = {f"{k}.{n}": a for k in wrong for n, a in wrong[k].items()}
    said = error(model, state, given)
    for words in ("a.running_var", f"a.{COUNT} is -5", "b.running_mean", "b.running_var"):
        assert words in said
    assert (f"b.{COUNT}" in said) & ("c.weight" in said) & ("c.running_mean" in said)
    entries = {3: np.ones(1), "meta": Broken(), "x._extra_state": {"a": 1}, "epoch": "last"}
    said = error(model, state, given | entries)
    for words in ("3", "'meta'", "it has no values", "'x._extra_state'", "'epoch'"):
        assert words in said
    checkpoint = {"model": {"weight": np.ones(C)}, "epoch": 3}
    assert "['model']" in error(model, state, checkpoint)
    assert ".state_dict() returns" in error(model, state, SimpleNamespace(state_dict=dict))
    assert "a.num_batches" in error(model, state, given | {f"a.{COUNT}": np.ones(2)})


def test_another_shape_is_an_error_and_what_is_left_over_if_strict():
    model, state = built(["convolution", "norm", "linear", "array"])
    given = filled(model, state)
    left = {n: a for n, a in given.items() if n != "2.bias"} | {"extra.weight": np.ones(3)}
    said = error(model, state, left)
    assert re.search(r"only in the model: .*2", said)
    assert re.search("only in the state_dict: .*extra.weight", said)
    loaded, _, _ = from_torch(model, state, left, strict=False)
    np.testing.assert_array_equal(loaded[1].weight, given["1.weight"])
    assert loaded[2].bias is model[2].bias
    shapes = left | {"0.weight": np.ones((6, 2, 5)), "3": np.ones((3, 2))}
    for said in (error(model, state, shapes), error(model, state, shapes, strict=False)):
        assert re.search(
            r"0\.weight .*(\(6, 2, 5\).*\(6, 2, 3\)|\(6, 2, 3\).*\(6, 2, 5\))", said
        )
        assert re.search(r"\(3, 2\)", said)
    assert "names has ['[9]'], with which no path" in error(model, state, given, {"[9]": "a"})
    with pytest.raises(ValueError, match=r"\['a.bias', 'a.weight'\]"):
        to_torch(*built(["linear", "linear"]), lambda _: "a")


def test_the_error_for_a_very_different_model_is_short():
    model, state = built(["convolution", "norm"] * 30)
    other = {n: np.ones((*a.shape, 2)) for n, a in filled(model, state).items()}
    for given in (other, renamed(other, there=r"^\d+"), {f"x{n}": a for n, a in other.items()}):
        said = error(model, state, given)
        assert len(said.splitlines()) <= 30
        assert len(said) < 4000


@pytest.mark.parametrize("kind", ["norm", "linear", "convolution", "transposed", "embedding"])
def test_ensembles_are_refused(kind):
    several, state = eqx.filter_vmap(lambda _: built([kind]))(jnp.arange(3))
    assert "ensemble" in error(several, state, filled(*built([kind])))
    with pytest.raises(ValueError, match="ensemble"):
        to_torch(several, state)


def test_models_that_cannot_be_translated():
    theirs = eqx.nn.make_with_state(lambda: [eqx.nn.BatchNorm(C, "batch", mode="ema")])()
    assert re.search(r"^\[0\]: .*eqx_norm\.models\.swap", error(*theirs, {}))
    layer, state = make(C, "batch", approach=Unloaded())
    assert "in the model's state" in error(layer, None, statistics())
    assert "Cumulative cannot take over" in error(layer, state, statistics())
    assert (to_torch(layer, state)["running_var"] == 1).all()
    with pytest.raises(ValueError, match="another model"):
        to_torch(layer, built(["norm"])[1])


def test_the_examples_in_the_docstrings():
    model, state = built({"head": "linear", "norm": "norm"})
    given = renamed(filled(model, state), fc="^head")
    torch = SimpleNamespace(load=lambda *_, **__: given, from_numpy=np.asarray)
    names = {"from_torch": from_torch, "to_torch": to_torch, "torch": torch}
    names |= example(from_torch, **names, model=model, state=state)
    assert same(example(to_torch, **names)["state_dict"], renamed(given, head="^fc"))
