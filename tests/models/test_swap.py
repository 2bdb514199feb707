"""Tests that a model whose layers were swapped is the one that was built with the others."""

import io
from typing import Any

import equinox as eqx
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import eqx_norm
from eqx_norm.models import reconfigure, swap, unswap
from eqx_norm.models._layers import entries, found
from eqx_norm.strategies import Accumulated, Adam, Batch, SmoothStart, VarianceClip
from tests.helpers import example, f32, floats, normal, same
from tests.models.nested import (
    KEY,
    NORMS,
    OURS,
    THEIRS,
    C,
    Two,
    call,
    descriptions,
    inferred,
    made,
    shapes,
    unchecked,
)

ULP = float(np.finfo(np.float32).eps)
each_mode = pytest.mark.parametrize("mode", ["batch", "ema"])


def make(mode: Any = "batch", **kwargs: Any) -> Any:
    return eqx.nn.make_with_state(eqx.nn.BatchNorm)(C, "batch", mode=mode, **kwargs)


def with_history(norm, state, seed, steps, members=0):
    """Returns the state of a norm after so many batches, as Equinox has it in float32, and the
    average of their means and variances, in float64."""
    shape, m = (members, C) if members else (C,), norm.momentum
    batches = np.random.RandomState(seed).uniform(0.1, 10, (steps, 2, *shape))
    start = np.array([np.zeros(shape), np.ones(shape)])
    if not steps:
        return state, start
    if norm.mode == "ema":
        state = state.set(norm.ema_first_time_index, jnp.zeros(shape[:-1], bool))
        return state.set(norm.ema_state_index, tuple(f32(batches[0]))), batches[0]
    held, average = f32(start), 0 * start
    for batch in batches:
        held = held * m + f32(batch) * (1 - m)
        average = m * average + (1 - m) * batch
    counter = norm.batch_counter
    state = state.set(counter, jnp.full_like(state.get(counter), steps))
    return state.set(norm.batch_state_index, tuple(held)), average / (1 - m**steps)


@hypothesis.given(descriptions, st.sampled_from([0, 2]), st.integers(0, 40))
@hypothesis.settings(max_examples=9)
def test_is_the_model_built_with_these_layers(description, members, steps):
    model, state = made(description, THEIRS, members)
    right = {}
    for seed, (path, norm) in enumerate(found(model, eqx.nn.BatchNorm).items()):
        state, right[path] = with_history(norm, state, seed, steps, members)
    norms = found(model, NORMS)
    hypothesis.assume(norms)
    new, new_state = swap(model, state)
    assert shapes((new, new_state)) == shapes(made(description, OURS, members))
    assert shapes(unswap(new, new_state)) == shapes((model, state))
    for path, norm in found(new, NORMS).items():
        assert (norm.weight is norms[path].weight) & (norm.bias is norms[path].bias)
    held, new_held = entries(state), entries(new_state)
    assert all(new_held[marker] is held[marker] for marker in {*held} & {*new_held})
    assert not any("batch_" in marker or "ema_" in marker for marker in new_held)
    for path, norm in found(new, eqx_norm.BatchNorm).items():
        counted = steps if norms[path].mode == "batch" else 0
        weight = 1 - norm.momentum**steps if counted else float(steps > 0)
        # Each step of Equinox's has rounded three times, as far back as it remembers, and all
        # that is divided by the weight.
        tolerance = 3 * ULP * max(1, min(steps, 1 / (1 - norm.momentum))) / (weight or 1)
        for ours, exact in zip(inferred(norm, new_state), right[path], strict=True):
            np.testing.assert_allclose(ours, exact, rtol=tolerance, atol=10 * tolerance)
        np.testing.assert_allclose(new_state.get(norm.memory_index).weight, weight, rtol=1e-6)
        assert (np.asarray(new_state.get(norm.accepted_index)) == counted).all()
        assert not np.asarray(new_state.get(norm.rejected_index)).any()


@hypothesis.given(descriptions, st.sampled_from([0, 2]))
@hypothesis.settings(max_examples=3)
def test_outputs_are_the_same_in_training_and_in_inference(description, members):
    with jax.enable_x64(True):  # where a layer does not amplify what others have rounded
        model, state = made(description, THEIRS, members)
        model = eqx.nn.inference_mode(model, value=False)
        hypothesis.assume(norms := found(model, NORMS).values())
        shape = (members, 8, C) if members else (8, C)
        ours, our_state, x = None, None, None
        for step in range(2):
            (ours, our_state), x = swap(model, state), floats(normal(step, shape, 0.5))
            (y, our_state), (right, state) = call(ours, our_state, x), call(model, state, x)
            np.testing.assert_allclose(y, right, rtol=1e-6, atol=1e-6)
        if all(getattr(norm, "mode", "ema") == "ema" for norm in norms):
            ours, model = map(eqx.nn.inference_mode, (ours, model))
            y, right = call(ours, our_state, x)[0], call(model, state, x)[0]
            np.testing.assert_allclose(y, right, rtol=1e-6, atol=1e-6)


def equinox_s(norm, state):
    """Returns the mean and the variance of inference in Equinox's layer."""
    mean, variance = state.get(norm.ema_state_index or norm.batch_state_index)
    count = 0 if norm.mode == "ema" else state.get(norm.batch_counter)
    scale = jnp.where(count == 0, 1, 1 - norm.momentum**count)
    return mean / scale, variance / scale


def test_training_goes_on_as_if_it_had_begun_with_this_layer():
    (norm, state), x = make(momentum=0.9), normal(0, (16, C))
    ours, right = made(("BatchNorm", {"mode": "batch", "momentum": 0.9}), OURS)
    for step in range(3):
        x = normal(step, (16, C), step, 2)
        state, right = call(norm, state, x)[1], call(ours, right, x)[1]
        if not step:  # Equinox divides its start by 1 - m, too
            assert equinox_s(norm, state)[1].min() > 9
            np.testing.assert_allclose(inferred(*swap(norm, state))[1], x.var(0), rtol=1e-5)
    swapped, taken = swap(norm, state)
    taken, right = (call(n, s, x)[1] for n, s in ((swapped, taken), (ours, right)))
    for a, b in zip(*map(jax.tree.leaves, (taken, right)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)


@each_mode
def test_statistics_that_were_put_there_are_taken_as_they_are(mode):
    """As those of PyTorch are: without a count of batches that would say how."""
    norm, state = make(mode)
    put = f32([1, 2, 3]), f32([4, 5, 6])
    ours, after = swap(norm, state.set(norm.batch_state_index or norm.ema_state_index, put))
    assert same(inferred(ours, after), put)
    assert after.get(ours.memory_index).weight == 1


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.complex64])
@each_mode
def test_dtypes(mode, dtype):
    norm, state = make(mode, dtype=dtype)
    ours, after = swap(norm, state)
    right = eqx.nn.make_with_state(eqx_norm.BatchNorm)(C, "batch", mode=mode, dtype=dtype)
    assert shapes((ours, after)) == shapes(right)
    assert ours.weight.dtype == dtype
    if mode == "batch":
        state = state.set(norm.batch_counter, jnp.full_like(state.get(norm.batch_counter), 8))
        _, variance = inferred(*swap(norm, state))
        assert (np.asarray(variance) >= 0).all()  # 1 - m^8 is more than all there is


def test_layers_that_share_a_state_still_do():
    norm, other = (eqx.nn.BatchNorm(C, "batch", mode="batch") for _ in range(2))
    model = Two(norm, [norm, other])
    state, model = eqx.nn.State(model), eqx.nn.delete_init_state(model)
    new, new_state = swap(model, state)
    indices = [layer.memory_index.marker for layer in (new.first, *new.second)]
    assert indices[0] is indices[1] is not indices[2]
    assert new.first.weight is new.second[0].weight
    back, back_state = unswap(new, new_state)
    assert back.first.batch_counter.marker is back.second[0].batch_counter.marker
    assert (len(entries(new_state)), len(entries(back_state))) == (6, 4)


def test_a_part_of_a_model_keeps_the_names_of_the_whole():
    model, state = made([("BatchNorm", {"mode": mode}) for mode in ("batch", "ema")], THEIRS)
    new, new_state = swap(model[1], state)
    assert new.memory_index.marker == "list[1].memory_index"
    assert [*entries(new_state)][-2:] == ["list[0].batch_counter", "list[0].batch_state_index"]
    assert shapes(swap([model[0], new], new_state)) == shapes(swap(model, state))
    some, some_state = swap(model, state, where=lambda path, layer: layer.mode == "ema")
    assert (some[0], type(some[1])) == (model[0], eqx_norm.BatchNorm)
    assert shapes(swap(some, some_state)) == shapes(swap(model, state))


def test_overrides_are_of_all_layers_that_are_swapped():
    batch = "BatchNorm", {"mode": "batch", "momentum": 0.9}
    theirs = made([batch, ("LayerNorm", {})], THEIRS)
    new, state = swap(*theirs, "smooth_start", eps=1e-3, unbiased=True, activation=jax.nn.relu)
    assert (new[0].approach, new[0].unbiased) == (SmoothStart(0.9), True)
    assert [norm.eps for norm in new] == [1e-3, 1e-3]
    assert [norm.activation(-1.0) for norm in new] == [0, 0]
    assert call(new, state, normal(0, (4, C)))[0].min() == 0
    assert eqx.tree_equal(swap(new, state, "batch", eps=0.1), (new, state))  # is ours already
    assert swap(*theirs, VarianceClip(Adam(0.5)))[0][0].momentum == 0.5
    assert swap(*theirs, momentum=0.7)[0][0].approach == Batch(0.7)
    back = unswap(*swap(*theirs, "adam"), "ema")[0][0]  # a mode is said where there is none
    assert (back.mode, back.momentum) == ("ema", 0.9)
    there = eqx.filter_eval_shape(lambda m, s: swap(m, s, "ema"), *theirs)  # inside of jit
    assert jax.tree.structure(there[1]) == jax.tree.structure(swap(*theirs, "ema")[1])


@pytest.mark.parametrize("steps", [0, 1, 5])
@each_mode
def test_there_and_back(mode, steps):
    norm, state = made(("BatchNorm", {"mode": mode}), OURS)
    for step in range(steps):
        _, state = call(norm, state, normal(step, (16, C), 3, 2))
    wrapped, pending = reconfigure(norm, state, approach=lambda s: Accumulated(s, every=2))
    theirs, their_state = unswap(norm, state)
    _, pending = call(wrapped, pending, normal(9, (16, C)))  # is no batch there
    assert eqx.tree_equal((theirs, their_state), unswap(wrapped, pending))
    again, again_state = swap(theirs, their_state)
    assert again.approach == norm.approach
    assert shapes((again, again_state)) == shapes((norm, state))
    ours = inferred(norm, state)
    for a, b in zip(inferred(again, again_state), ours, strict=True):
        np.testing.assert_allclose(a, b, rtol=2 * ULP)
    if steps:
        for a, b in zip(equinox_s(theirs, their_state), ours, strict=True):
            np.testing.assert_allclose(a, b, rtol=ULP)
        x = normal(9, (16, C), 3, 2)  # and training goes on there
        (y, _), (right, _) = call(theirs, their_state, x), call(norm, state, x)
        np.testing.assert_allclose(y, right, atol=4e-6)


def test_checkpoints_are_those_of_a_model_with_these_layers():
    description = [("BatchNorm", {"mode": "batch"}), ("SpectralNorm", {}), ("LayerNorm", {})]
    model, state = made(description, THEIRS)
    _, state = call(model, state, normal(0, (8, C)))
    file = io.BytesIO()
    ours = swap(model, state)
    eqx.tree_serialise_leaves(file, ours)
    file.seek(0)
    read = eqx.tree_deserialise_leaves(file, made(description, OURS))
    assert eqx.tree_equal(read, ours, typematch=True)


def test_the_examples_in_the_docstrings(tmp_path):
    def build(key):
        return eqx.nn.Sequential([eqx.nn.BatchNorm(C, "batch", mode="ema")])

    names = {**globals(), "build": build, "key": KEY, "path": tmp_path / "model.eqx"}
    before = eqx.nn.make_with_state(build)(KEY)
    eqx.tree_serialise_leaves(names["path"], before)
    names = example(swap, **names)  # reads the file
    assert type(names["model"].layers[0]) is eqx_norm.BatchNorm
    names = example(unswap, **names)  # writes it
    assert shapes(eqx.tree_deserialise_leaves(names["path"], before)) == shapes(before)


class LayerNorm2d(eqx.nn.LayerNorm):
    """Is ConvNeXt's: over the channels of each place."""

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return jax.vmap(jax.vmap(super().__call__, 1, 1), 2, 2)(x)


class Own(eqx_norm.BatchNorm):
    def __init__(self):
        super().__init__(C, "batch", approach="batch")


def test_a_subclass_is_named_with_the_where_that_leaves_it():
    subclass: Any = LayerNorm2d
    norm = eqx.nn.BatchNorm(C, "batch", mode="ema")
    model = [subclass(C), norm, eqx.nn.LayerNorm(C)]
    state, model = eqx.nn.State(model), eqx.nn.delete_init_state(model)
    error = r"^\[0\]: tests\.\S+\.LayerNorm2d is a subclass, and .* where=(lambda .*)\.$"
    with pytest.raises(ValueError, match=error) as raised:
        swap(model, state)
    where = eval(str(raised.value).split("where=")[1].removesuffix("."))
    left, *others = swap(model, state, where=where)[0]
    assert left is model[0]
    assert [type(n) for n in others] == [eqx_norm.BatchNorm, eqx_norm.LayerNorm]


NORM = [("BatchNorm", {"mode": "batch"})]
BAD: Any = [("BatchNorm", {"mode": "ema", "eps": 0.0})]
LINEAR = made(("Linear", {}), OURS)
FOREIGN = made(NORM, THEIRS)[0], LINEAR[1]
# What is swapped (ours: back) by which arguments, and the error.
WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (LINEAR, {}, r"nothing to swap: .* no eqx.nn.BatchNorm .* jaxonmodels"),
    (LINEAR, {"momentum": 7.0}, "nothing to swap"),
    (made(NORM, THEIRS), {"dtype": "f2"}, "^dtype= cannot be changed in a layer that"),
    (made(NORM, THEIRS), {"momentum": 7.0}, r"^\[0\]: momentum=7.0: "),
    (made(NORM, THEIRS), {"approach": "bach"}, r"^\[0\]: approach='bach' is not known"),
    (made(NORM, THEIRS), {"where": "[0]"}, r"^where='\[0\]'"),
    (made(NORM, THEIRS), {"where": lambda *_: 0}, r"where= took none of \[0\]"),
    (made([("LayerNorm", {})], THEIRS), {"momentum": 0.5}, "^momentum= is a setting of Batch"),
    (made(BAD, THEIRS), {}, r"^\[0\]: eps=0.0: "),
    (FOREIGN, {}, r"^\[0\]: .*'list\[0\]\.batch_counter'.* another model"),
]
BACK: list[tuple[Any, dict[str, Any], str]] = [
    (LINEAR, {}, "nothing to unswap: the model holds no layer of eqx_norm"),
    ((made(NORM, OURS)[0], LINEAR[1]), {}, r"^\[0\]: .*'list\[0\].*another model"),
    (made(NORM, OURS), {"mode": "adam"}, "^mode='adam': .*mode='batch'"),
    (swap(*made(NORM, THEIRS), "adam"), {}, r"^\[0\]: approach=Adam\("),
    (eqx.nn.make_with_state(Own)(), {}, "^Own: .*Own is a subclass"),
    (swap(*made(NORM, THEIRS), activation=jnp.tanh), {}, r"^\[0\]: activation=.*reconfigure"),
]


@pytest.mark.parametrize("row", WRONG + BACK, ids=lambda row: row[2])
def test_errors_name_the_layer_and_what_to_do(row):
    model, given, error = row
    with unchecked(), pytest.raises(ValueError, match=error):
        (swap if any(row is wrong for wrong in WRONG) else unswap)(*model, **given)
