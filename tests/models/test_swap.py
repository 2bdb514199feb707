"""Tests that a swapped model equals one that was built with the other layers."""

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
from eqx_norm.strategies import Accumulated, Batch, SmoothStart
from tests.helpers import example, f32, normal, same
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


def with_history(norm, state, seed, steps, members):
    """Returns the state of Equinox's norm after `steps` batches, in float32, and the average of
    their means and variances, in float64."""
    shape = (members, C)[not members :]
    right = np.random.RandomState(seed).uniform(0.1, 10, (2, *shape))
    if norm.mode == "ema":
        state = state.set(norm.ema_first_time_index, jnp.zeros(shape[:-1], bool))
        return state.set(norm.ema_state_index, tuple(f32(right))), right
    start = float(np.float32(norm.momentum)) ** steps
    mean, variance = (1 - start) * right
    counter = norm.batch_counter
    state = state.set(counter, jnp.full_like(state.get(counter), steps))
    return state.set(norm.batch_state_index, (f32(mean), f32(variance + start))), right


@hypothesis.given(descriptions, st.sampled_from([0, 2]), st.integers(1, 40))
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
    for path, norm in found(new, eqx_norm.BatchNorm).items():
        counted = steps if norms[path].mode == "batch" else 0
        weight = 1 - norm.momentum**counted or 1
        # What is held has been rounded, and is divided by the weight.
        tolerance = 20 * ULP / weight
        found_here = inferred(norm, new_state)
        np.testing.assert_allclose(found_here, right[path], rtol=tolerance, atol=tolerance)
        held = new_state.get(norm.memory_index)
        found_weight = held.statistics.weight(norms[path].momentum)
        np.testing.assert_allclose(found_weight, weight, rtol=1e-6)
        assert (np.asarray(held.accepted) == counted).all()


def equinox_s(norm, state):
    """Returns the mean and the variance of inference in Equinox's layer."""
    mean, variance = state.get(norm.ema_state_index or norm.batch_state_index)
    count = 0 if norm.mode == "ema" else state.get(norm.batch_counter)
    scale = jnp.where(count == 0, 1, 1 - norm.momentum**count)
    return mean / scale, variance / scale


def test_training_goes_on_as_if_it_had_begun_with_this_layer():
    description = "BatchNorm", {"mode": "batch", "momentum": 0.9}
    (norm, state), (ours, right) = made(description, THEIRS), made(description, OURS)
    x = normal(0, (16, C))
    for step in range(3):
        x = normal(step, (16, C), step, 2)
        state, right = call(norm, state, x)[1], call(ours, right, x)[1]
        if not step:  # Equinox divides its start by 1 - m, too
            assert equinox_s(norm, state)[1].min() > 9
            np.testing.assert_allclose(inferred(*swap(norm, state))[1], x.var(0), rtol=1e-5)
    taken, right = (call(n, s, x) for n, s in (swap(norm, state), (ours, right)))
    for a, b in zip(*map(jax.tree.leaves, (taken, right)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(taken[0], call(norm, state, x)[0], atol=2e-6)


def test_after_the_way_back_the_next_batches_count_for_less():
    """They count for less after few batches, whose number Equinox's layer cannot keep."""
    norm, state = made(("BatchNorm", {"mode": "batch", "momentum": 0.9}), OURS)
    for step in range(3):
        _, state = call(norm, state, normal(step, (16, C), 3, 2))
    again, taken = swap(*unswap(norm, state))
    held = inferred(norm, state)
    np.testing.assert_allclose(inferred(again, taken), held, rtol=2 * ULP)
    assert state.get(norm.memory_index).statistics.batches == 3
    assert taken.get(again.memory_index).statistics.weight(0.9) == 1
    x = normal(9, (16, C))
    mean, right = (inferred(n, call(n, s, x)[1])[0] for n, s in ((again, taken), (norm, state)))
    assert (abs(mean - held[0]) < abs(right - held[0])).all()


@each_mode
def test_statistics_that_were_put_there_are_taken_as_they_are(mode):
    """So are PyTorch's statistics, which have no count of batches."""
    norm, state = make(mode)
    put = f32([1, 2, 3]), f32([4, 5, 6])
    ours, after = swap(norm, state.set(norm.batch_state_index or norm.ema_state_index, put))
    assert same(inferred(ours, after), put)
    assert after.get(ours.memory_index).statistics.weight(0.99) == 1


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.complex64])
def test_dtypes(dtype):
    norm, state = make(dtype=dtype)
    right = eqx.nn.make_with_state(eqx_norm.BatchNorm)(C, "batch", mode="batch", dtype=dtype)
    assert shapes(swap(norm, state)) == shapes(right)
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
    assert (len(entries(new_state)), len(entries(unswap(new, new_state)[1]))) == (2, 4)


def test_a_part_of_a_model_keeps_the_names_of_the_whole():
    model, state = made([("BatchNorm", {"mode": mode}) for mode in ("batch", "ema")], THEIRS)
    part, _ = swap(model[1], state)
    assert part.memory_index.marker == "list[1].memory_index"
    some, some_state = swap(model, state, where=lambda path, layer: layer.mode == "ema")
    assert (some[0], type(some[1])) == (model[0], eqx_norm.BatchNorm)
    assert shapes(swap(some, some_state)) == shapes(swap(model, state))


def test_overrides_are_of_all_layers_that_are_swapped():
    batch = "BatchNorm", {"mode": "batch", "momentum": 0.9}
    theirs = made([batch, ("LayerNorm", {})], THEIRS)
    new, state = swap(*theirs, "smooth_start", eps=1e-3, unbiased=True, activation=jax.nn.relu)
    assert (new[0].approach, new[0].unbiased) == (SmoothStart(0.9), True)
    assert [(norm.eps, norm.activation(-1.0)) for norm in new] == [(1e-3, 0)] * 2
    assert eqx.tree_equal(swap(new, state, "batch", eps=0.1), (new, state))  # is ours already
    assert swap(*theirs, momentum=0.7)[0][0].approach == Batch(0.7)
    back = unswap(*swap(*theirs, "adam"), "ema")[0][0]  # a mode is said where there is none
    assert (back.mode, back.momentum) == ("ema", 0.9)
    there = eqx.filter_eval_shape(lambda m, s: swap(m, s, "ema"), *theirs)  # inside of jit
    assert jax.tree.structure(there[1]) == jax.tree.structure(swap(*theirs, "ema")[1])


@pytest.mark.parametrize("steps", [0, 5])
@each_mode
def test_there_and_back(mode, steps):
    norm, state = made(("BatchNorm", {"mode": mode}), OURS)
    for step in range(steps):
        _, state = call(norm, state, normal(step, (16, C), 3, 2))
    wrapped, pending = reconfigure(norm, state, approach=lambda s: Accumulated(s, every=2))
    theirs, their_state = unswap(norm, state)
    _, pending = call(wrapped, pending, normal(9, (16, C)))  # is no batch there
    assert eqx.tree_equal((theirs, their_state), unswap(wrapped, pending))
    again = swap(theirs, their_state)
    assert shapes(again) == shapes((norm, state))
    ours = inferred(norm, state)
    np.testing.assert_allclose(inferred(*again), ours, rtol=2 * ULP)
    if steps:
        np.testing.assert_allclose(equinox_s(theirs, their_state), ours, rtol=ULP)
        x = normal(9, (16, C), 3, 2)  # and training goes on there
        (y, _), (right, _) = call(theirs, their_state, x), call(norm, state, x)
        np.testing.assert_allclose(y, right, atol=4e-6)


def test_norms_of_one_example_there_and_back():
    """An `InstanceNorm`, which Equinox lacks, comes back as a `GroupNorm`."""
    model = [
        eqx_norm.InstanceNorm(C, 1e-3, affine=True),
        eqx_norm.GroupNorm(1, channelwise_affine=False, eps=1e-4),
        eqx_norm.RMSNorm((C,), use_bias=False),
    ]
    theirs, state = unswap(model, eqx.nn.State(()))
    assert [type(n) for n in theirs] == [eqx.nn.GroupNorm] * 2 + [eqx.nn.RMSNorm]
    again, _ = swap(theirs, state, activation=jax.nn.relu)
    assert [type(n) for n in again] == [eqx_norm.GroupNorm] * 2 + [eqx_norm.RMSNorm]
    x = normal(0, (C,), 1, 2)
    for ours, norm, relu in zip(model, theirs, again, strict=True):
        assert (norm.eps, norm.weight is ours.weight) == (ours.eps, True)
        np.testing.assert_allclose(norm(x), ours(x), atol=1e-5)
        np.testing.assert_allclose(relu(x), jax.nn.relu(ours(x)), atol=1e-6)


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
LINEAR = made(("Linear", {}), OURS)
FOREIGN = made(NORM, THEIRS)[0], LINEAR[1]
# What is swapped (ours: back) by which arguments, and the error.
WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (LINEAR, {}, r"nothing to swap: .* no BatchNorm, LayerNorm.* jaxonmodels"),
    (made(NORM, THEIRS), {"eps": 0.0}, r"^\[0\]: eps=0.0: "),
    (made(NORM, THEIRS), {"where": "[0]"}, r"^where='\[0\]'"),
    (FOREIGN, {}, r"^\[0\]: .*'list\[0\]\.batch_counter'.* another model"),
]
BACK: list[tuple[Any, dict[str, Any], str]] = [
    (made(NORM, OURS), {"mode": "adam"}, "^mode='adam': .*mode='batch'"),
    (swap(*made(NORM, THEIRS), "adam"), {}, r"^\[0\]: approach=Adam\("),
    (swap(*made(NORM, THEIRS), activation=jnp.tanh), {}, r"^\[0\]: activation=.*reconfigure"),
]


@pytest.mark.parametrize("row", WRONG + BACK, ids=lambda row: row[2])
def test_errors_name_the_layer_and_what_to_do(row):
    model, given, error = row
    with unchecked(), pytest.raises(ValueError, match=error):
        (swap if any(row is wrong for wrong in WRONG) else unswap)(*model, **given)
