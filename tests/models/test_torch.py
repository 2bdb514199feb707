"""Tests `from_torch` and `to_torch` on dicts as PyTorch gives them, without PyTorch.

`test_torch_peers.py` compares with PyTorch itself.
"""

import re
from types import SimpleNamespace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import BatchNorm, LayerNorm
from eqx_norm.models import from_torch, to_torch
from eqx_norm.strategies import Accumulated, Average, Batch
from tests.helpers import example, floats, make, same
from tests.helpers import quick_call as call
from tests.models.nested import KEY, shapes

C, COUNT = 4, "num_batches_tracked"


def norm(**kwargs):
    return BatchNorm(C, "batch", **{"approach": "batch", **kwargs})


def linear(out=2):
    return eqx.nn.Linear(3, out, key=KEY)


LAYERS: dict[str, Any] = {
    "norm": norm,
    "norm without weights": lambda: norm(channelwise_affine=False),
    "norm with PReLU": lambda: norm(activation=eqx.nn.PReLU(jnp.full((C,), 0.25))),
    "layer norm": lambda: LayerNorm((2, 3)),
    "layer norm without weights": lambda: LayerNorm(C, use_weight=False, use_bias=False),
    "linear": linear,
    "linear to a scalar": lambda: eqx.nn.Linear(3, "scalar", use_bias=False, key=KEY),
    "embedding": lambda: eqx.nn.Embedding(5, 2, key=KEY),
    "convolution": lambda: eqx.nn.Conv1d(4, 6, 3, groups=2, key=KEY),
    "transposed": lambda: eqx.nn.ConvTranspose2d(4, 6, (3, 2), groups=2, key=KEY),
    "array": lambda: jnp.zeros((2, 3)),
}


def built(form: Any) -> tuple[Any, Any]:
    """Returns a model with the structure of `form`, and layers in place of their names."""
    return eqx.nn.make_with_state(lambda: jax.tree.map(lambda name: LAYERS[name](), form))()


def filled(model: Any, state: Any = None) -> dict[str, np.ndarray]:
    """Returns a `state_dict` of random numbers for such a model."""
    random, arrays = np.random.RandomState(0), to_torch(model, state)
    return {k: np.asarray(random.uniform(1, 9, a.shape), a.dtype) for k, a in arrays.items()}


def error(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(ValueError) as raised:  # noqa: PT011 (the caller looks)
        from_torch(*args, **kwargs)
    return str(raised.value)


def renamed(state_dict: Any, **names: str) -> dict[str, Any]:
    """Returns the dict with regular expressions in its keys replaced by the given names."""
    for new, old in names.items():
        state_dict = {re.sub(old, new, name): array for name, array in state_dict.items()}
    return state_dict


def test_there_and_back_is_the_same_to_the_bit():
    model, state = built([{"a b": kind} for kind in LAYERS])
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
    assert shapes((loaded, after)) == shapes((model, state))
    assert same(before, jax.tree.leaves((model, state)))  # which stay valid


def statistics(**changed):
    return {
        "weight": np.ones(C),
        "bias": np.zeros(C),
        "running_mean": np.arange(C, dtype=float),
        "running_var": np.arange(1.0, C + 1),
        COUNT: np.array(7),
    } | changed


@pytest.mark.parametrize("tracked", [0, 7])
@pytest.mark.parametrize(
    "approach", [Batch(0.9), Average(), Accumulated(Average(), 2)], ids=str
)
def test_training_goes_on_as_in_pytorch(approach, tracked):
    """An untrained layer's mean of 0 and variance of 1 count, too; so do batches that are
    accumulated, and not their parts."""
    untrained = {} if tracked else {"running_mean": np.zeros(C), "running_var": np.ones(C)}
    state_dict = statistics(**untrained)
    mean, var = state_dict["running_mean"], state_dict["running_var"]
    if not tracked:
        del state_dict[COUNT]
    layer, state = make(C, "batch", approach=approach, unbiased=True)
    layer, state, _ = from_torch(layer, state, state_dict)
    random = np.random.RandomState(0)
    for k in range(tracked + 1, tracked + 4):
        x = random.standard_normal((6, C, 3)) * np.arange(1, C + 1)[:, None] + 2
        for part in np.split(x, getattr(approach, "every", 1)):
            _, state = call(layer, state, floats(part))
        share = 1 / k if layer.momentum is None else 1 - layer.momentum
        mean = (1 - share) * mean + share * x.mean((0, 2))
        var = (1 - share) * var + share * x.var((0, 2), ddof=1)
    expected = {"running_mean": mean, "running_var": var, COUNT: tracked + 3}
    ours = to_torch(layer, state)
    for name, value in expected.items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


def test_names_that_coincide_go_before_the_order():
    model = {name: linear(3) for name in "qkv"}
    state_dict = filled(model)
    shuffled = {n: state_dict[n] for part in "kvq" for n in state_dict if n.startswith(part)}
    assert same(to_torch(from_torch(model, None, shuffled)[0]), state_dict)
    # One has another name, so it is matched as the only one left.
    loaded, _, report = from_torch(model, None, renamed(shuffled, query="^q"))
    assert report.matched == {"['k']": "k", "['q']": "query", "['v']": "v"}
    assert same(to_torch(loaded), state_dict)


def test_the_rest_goes_by_order_among_layers_of_one_form_where_equally_many():
    """The model has its convolutions first; the `state_dict` alternates them with norms."""
    model, state = built([["convolution", "convolution"], ["norm", "norm"]])
    other = {"c1": "convolution", "n1": "norm", "c2": "convolution", "n2": "norm"}
    state_dict = filled(*built(other))
    loaded, _, report = from_torch(model, state, state_dict)
    assert [*report.matched.values()] == ["c1", "c2", "n1", "n2"]
    np.testing.assert_array_equal(loaded[0][1].weight, state_dict["c2.weight"])
    more = state_dict | {f"c3.{n}": a for n, a in filled(*built("convolution")).items()}
    _, _, report = from_torch(model, state, more, strict=False)
    assert [*report.matched.values()] == ["n1", "n2"]


def test_names_are_a_mapping_of_beginnings_or_a_function():
    model, state = built({"stem": ["convolution", "norm"], "head": "linear"})
    state_dict = filled(model, state)
    wrapped = {f"module.{name}": array for name, array in state_dict.items()}
    assert same(to_torch(*from_torch(model, state, wrapped, {"": "module"})[:2]), state_dict)
    other = renamed(state_dict, **{"features.conv": r"^stem\.0", "features.bn": r"^stem\.1"})
    parts = {"['stem'][0]": "features.conv", "stem.1": "features.bn"}
    matched = {"['head']": "head", "['stem'][0]": "features.conv", "['stem'][1]": "features.bn"}
    for names in (parts, matched.get, {"": "", **parts}):
        loaded, after, report = from_torch(model, state, other, names)
        assert report.matched == matched
        assert same(to_torch(loaded, after), state_dict)
        assert to_torch(loaded, after, names).keys() == other.keys()


@pytest.mark.parametrize(("stem", "head"), [("stem", "head"), ("features", "fc")])
def test_a_head_of_another_size_is_left_and_everything_else_is_loaded(stem, head):
    """This holds for equal and other names, and if another layer has the head's shape."""
    model, state = built({"stem": ["convolution", "norm", "linear"], "head": "linear"})
    state_dict = filled(model, state)
    other = state_dict | {"head.weight": np.ones((9, 3)), "head.bias": np.ones(9)}
    other = renamed(other, **{stem: "^stem", head: "^head"})
    loaded, after, report = from_torch(model, state, other, {"head": None}, strict=False)
    assert report.skipped == ("['head']",)
    assert report.unexpected == (() if head == "head" else ("fc.weight", "fc.bias"))
    assert same(loaded["head"], model["head"])
    expected = {name: array for name, array in state_dict.items() if "head" not in name}
    assert same(to_torch(loaded, after, {"head": None}), expected)
    lines = str(report).splitlines()
    assert lines[0].split() == ["['stem'][0]", "<-", f"{stem}.0"]
    assert lines[3] == "left out by names: ['head']"


def test_what_names_leaves_out_is_loaded_into_no_other_layer():
    model = {"body": linear(), "head": linear()}
    head = {n: a for n, a in filled(model).items() if "head" in n}
    loaded, _, report = from_torch(model, None, head, {"head": None}, strict=False)
    assert (report.matched, same(loaded, model)) == ({}, True)


def test_all_that_is_wrong_is_one_error_and_nothing_is_loaded():
    model, state = built({"a": "norm", "b": "norm", "c": "convolution", "d": "array"})
    state_dict = filled(model, state) | {
        "a.running_var": np.full(C, -4.0),
        "b.running_mean": np.full(C, np.nan),
        "b.running_var": np.full(C, 1e300 if floats(1).dtype == np.float32 else np.inf),
        "c.weight": np.ones((6, 2, 5)),
        "d": np.ones((3, 2)),
        "epoch": "last",
    }
    text = error(model, state, state_dict, strict=False)
    for problem in (
        "a.running_var is negative",
        "b.running_mean is not finite",
        "b.running_var is not finite",
        "c.weight has the shape (6, 2, 5), not (6, 2, 3) as here",
        "d has the shape (3, 2), not (2, 3) as here",
        "'epoch' is a str, not an array: leave it out",
    ):
        assert problem in text
    checkpoint = {"model": {"weight": np.ones(C)}, "epoch": 3}
    assert "checkpoint['model']" in error(model, state, checkpoint)


def test_what_is_left_over_is_an_error_if_strict():
    model, state = built(["convolution", "norm", "linear", "array"])
    state_dict = filled(model, state) | {"extra.weight": np.ones(3)}
    del state_dict["2.bias"]
    text = error(model, state, state_dict)
    assert "only in the model: 2.bias" in text
    assert "only in the state_dict: extra.weight" in text
    assert from_torch(model, state, state_dict, strict=False)[0][2].bias is model[2].bias


def test_the_error_for_a_very_different_model_is_short():
    model, state = built(["convolution", "norm"] * 30)
    other = {n: np.ones((*a.shape, 2)) for n, a in filled(model, state).items()}
    for state_dict in (other, {f"x{n}": a for n, a in other.items()}):
        text = error(model, state, state_dict)
        assert len(text.splitlines()) <= 30
        assert len(text) < 4000


def test_the_examples_in_the_docstrings():
    model, state = built({"head": "linear", "norm": "norm"})
    state_dict = renamed(filled(model, state), fc="^head")
    torch = SimpleNamespace(load=lambda *_, **__: state_dict, from_numpy=np.asarray)
    names = {"from_torch": from_torch, "to_torch": to_torch, "torch": torch}
    names |= example(from_torch, **names, model=model, state=state)
    assert same(example(to_torch, **names)["state_dict"], renamed(state_dict, head="^fc"))
