"""Tests `from_torch` and `to_torch` on dicts as PyTorch gives them, without PyTorch.

`test_torch_peers.py` compares with PyTorch itself.
"""

import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import BatchNorm, LayerNorm, RMSNorm
from eqx_norm.models import from_torch, to_torch
from eqx_norm.strategies import Accumulated, Average, Batch
from tests.compiling import filter_jit
from tests.documents import run
from tests.helpers import floats, make, member, same
from tests.helpers import quick_call as call
from tests.models.nested import KEY, donatable, shapes

UNOPTIMISED = True  # compares values: tests/compiling.py

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
    "norm around zero": lambda: RMSNorm(C, use_bias=False, weight_offset=1.0),
}


def built(form: Any) -> tuple[Any, Any]:
    """Returns a model with the structure of `form`, and layers in place of their names."""
    make = eqx.nn.make_with_state(lambda: jax.tree.map(lambda name: LAYERS[name](), form))
    return filter_jit(make)()


def filled(model: Any, state: Any = None) -> dict[str, np.ndarray]:
    """Returns a `state_dict` of random numbers for such a model."""
    random, arrays = np.random.RandomState(0), to_torch(model, state)
    return {k: np.asarray(random.uniform(1, 9, a.shape), a.dtype) for k, a in arrays.items()}


def error(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(ValueError) as raised:  # noqa: PT011 (the caller checks)
        from_torch(*args, **kwargs)
    return str(raised.value)


def renamed(state_dict: Any, **names: str) -> dict[str, Any]:
    """Returns the dict with regular expressions in its keys replaced by the given names."""
    for new, old in names.items():
        state_dict = {re.sub(old, new, name): array for name, array in state_dict.items()}
    return state_dict


def test_from_torch_and_to_torch_are_inverse_to_the_bit():
    model, state = built([{"a b": kind} for kind in LAYERS])
    state_dict = filled(model, state)
    before = jax.tree.leaves((model, state))
    loaded, after, report = from_torch(model, state, state_dict)
    back = to_torch(loaded, after)
    assert back.keys() == state_dict.keys()
    assert back["8.a b.bias"].shape == (6,)  # a convolution's, without spatial axes
    for name, array in state_dict.items():
        assert back[name].dtype == array.dtype
        assert back[name].flags.writeable
        np.testing.assert_array_equal(back[name], array)
    assert same(loaded[-1]["a b"].weight, state_dict["11.a b.weight"])  # as it is stored
    assert report[1:] == ((), (), ())
    assert shapes((loaded, after)) == shapes((model, state))
    assert donatable((loaded, after))
    assert same(before, jax.tree.leaves((model, state)))  # the originals stay valid


@pytest.mark.parametrize(
    ("approach", "tracked"),
    [(Batch(0.9), 0), (Average(), 7), (Accumulated(Average(), 2), 7)],
    ids=str,
)
def test_training_after_from_torch_continues_as_in_pytorch(approach, tracked):
    """Tests that an untrained layer's mean of 0 and variance of 1 count, and that accumulated
    batches count, not their parts."""
    mean = np.arange(C) if tracked else np.zeros(C)
    var = mean + 1
    state_dict = {"running_mean": mean, "running_var": var}
    state_dict |= {COUNT: np.array(tracked)} if tracked else {}
    layer, state = make(C, "batch", 1e-5, False, approach=approach, unbiased=True)
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


QKV = dict.fromkeys("kqv", "linear")
NET = {"head": "linear", "stem": ["convolution", "norm"]}
FEATURES = {"conv": r"^stem\.0", "bn": r"^stem\.1"}
PATHS = {"['head']": "head", "['stem'][0]": "conv", "['stem'][1]": "bn"}
BEGINNINGS = {"": "", "['stem'][0]": "conv", "stem.1": "bn"}
# The model; renames in the `state_dict`; `names`; the prefix that each layer is loaded from;
# the prefixes that no layer takes. The `state_dict` has its keys in reverse order.
MATCHES: dict[str, tuple[Any, dict[str, str], Any, str, str]] = {
    "by name, not by order": (QKV, {"w": "^q"}, None, "k - v", "w"),
    "by the longest prefix": (NET, FEATURES, BEGINNINGS, "head conv bn", ""),
    "by a function": (NET, FEATURES, PATHS.get, "head conv bn", ""),
    "in a DataParallel": (NET, {r"m.\g<0>": "^.+"}, {"": "m"}, "m.head m.stem.0 m.stem.1", ""),
    "a head is left out": (NET, {}, {"head": None}, "- stem.0 stem.1", ""),
    "a head of another name": (NET, {"fc": "^head"}, {"head": None}, "- stem.0 stem.1", "fc"),
}


@pytest.mark.parametrize("case", MATCHES)
def test_from_torch_matches_layers(case):
    form, renames, names, prefixes, left_over = MATCHES[case]
    model, state = built(form)
    before = to_torch(model, state)
    state_dict = dict(sorted(renamed(filled(model, state), **renames).items(), reverse=True))
    loaded, after, report = from_torch(model, state, state_dict, names, strict=False)
    layers = dict.fromkeys(name.rpartition(".")[0] for name in before)
    sources = dict(zip(layers, prefixes.split(), strict=True))
    assert {*report.matched.values()} == {*sources.values()} - {"-"}
    assert {name.rpartition(".")[0] for name in report.unexpected} == {*left_over.split()}
    for name, array in to_torch(loaded, after).items():
        layer, _, field = name.rpartition(".")
        np.testing.assert_array_equal(
            array, state_dict.get(f"{sources[layer]}.{field}", before[name])
        )
    if case == "by a function":
        assert to_torch(loaded, after, names).keys() == state_dict.keys()


def test_from_torch_reports_all_problems_in_one_error():
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


def test_arrays_of_other_layers_may_be_named_like_statistics():
    arrays = {"log_running_var": np.array([-1.0, 2.0]), COUNT: np.array([0.5, np.inf])}
    model, _, report = from_torch({name: jnp.zeros(2) for name in arrays}, None, arrays)
    assert same(model, jax.tree.map(floats, arrays))
    assert report[1:] == ((), (), ())
    *_, report = from_torch(model, None, {"log_running_var": np.ones(2)}, strict=False)
    assert report.missing == (COUNT,)


def test_num_batches_tracked_must_be_a_non_negative_int32():
    layer, state = built("norm without weights")
    arrays = {"running_mean": np.zeros(C), "running_var": np.ones(C)}
    for count in map(np.array, (2**31, 2**31 + 5, 2**40, -1, 0.5, np.nan, np.inf, 1j)):
        text = error(layer, state, arrays | {COUNT: count})
        assert f"{COUNT} is {count}, not a whole number from 0 to 2**31 - 1. Leave it" in text
    for count in (0, 7.0, 2**31 - 1):
        loaded = from_torch(layer, state, arrays | {COUNT: count})[:2]
        assert to_torch(*loaded)[COUNT] == count


def test_error_for_stacked_blocks_has_code_that_loads_each_block(tmp_path):
    form = {"linear": "linear", "norm": "norm"}
    state_dict = filled(*built({"blocks": [form, form], "head": "linear"}))

    def build():
        blocks = eqx.filter_vmap(lambda _: jax.tree.map(lambda name: LAYERS[name](), form))
        return {"blocks": blocks(jnp.ones(2)), "head": linear()}

    model, state = eqx.nn.make_with_state(build)()
    text = error(model, state, state_dict)
    assert re.match(r"\['blocks'\]\['linear'\]: Linear is stacked, .* \(2, 2, 3\)", text)
    names: Any = {"eqx": eqx, "jax": jax, "jnp": jnp, "results": []}
    names["stacked"] = model["blocks"], state.substate(model["blocks"])
    of_member, *of_all = (line.strip() for line in text.splitlines()[1:])
    for i in range(2):
        part, its = run(of_member, tmp_path, **names, i=i)["member"]
        loaded = from_torch(part, its, state_dict, {"": f"blocks.{i}"}, strict=False)
        names["results"] += [loaded[:2]]
    blocks, its = run("\n".join(of_all), tmp_path, **names)["stacked"]
    assert shapes(blocks) == shapes(model["blocks"])
    model, state = model | {"blocks": blocks}, state.update(its)
    model, state, _ = from_torch(model, state, state_dict, {"blocks": None})
    back = to_torch(model, state, {"blocks": None})
    for i in range(2):
        part, its = member((blocks, state.substate(blocks)), i)
        back |= to_torch(part, its, {"": f"blocks.{i}"})
    assert same(back, state_dict)


def test_error_for_unmatched_layers_suggests_names():
    model, state = built({"down": "linear", "gate": "linear", "norm": "norm"})
    original = filled(model, state)
    state_dict = dict(sorted(renamed(original, w1="^gate", w2="^down").items()))
    text = error(model, state, state_dict)
    assert "only in the model: down.weight, down.bias, gate.weight, gate.bias\n" in text
    assert "only in the state_dict: w1.bias, w1.weight, w2.bias, w2.weight\n" in text
    assert 'names={"head": "fc"}' in text
    assert "strict=False" in text
    *_, report = from_torch(model, state, state_dict, strict=False)
    names = report.matched | {"down": "w2", "gate": "w1"}
    loaded, after, _ = from_torch(model, state, state_dict, names)
    assert same(to_torch(loaded, after), original)

    names = {"down": None, "gate": "w1"}
    loaded, _, report = from_torch(model, state, state_dict, names, strict=False)
    assert same(loaded["down"], model["down"])
    rows = ["['gate']  <-  w1", "['norm']  <-  norm", "left out by names: ['down']"]
    assert str(report).splitlines() == [*rows, "only in the state_dict: w2.bias, w2.weight"]

    text = error(model, state, renamed(original, other="^"), strict=False)
    assert "only in the model: down.weight" in text  # no common name
    assert "strict=" not in text


def test_from_torch_error_for_a_very_different_model_is_short():
    model, state = built(["convolution", "norm"] * 15)
    other = {n: np.ones((*a.shape, 2)) for n, a in filled(model, state).items()}
    for state_dict in (other, {f"x{n}": a for n, a in other.items()}):
        text = error(model, state, state_dict)
        assert len(text.splitlines()) <= 30
        assert len(text) < 4000
