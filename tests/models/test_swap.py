"""Tests that a model whose layers were swapped is the one that was built with the others."""

import io
from types import SimpleNamespace
from typing import Any

import equinox as eqx
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import eqx_norm
from eqx_norm.models import reconfigure, swap, swapped, unswap
from eqx_norm.models._layers import entries, found
from eqx_norm.strategies import Adam, Batch, SmoothStart, VarianceClip
from tests.helpers import example, f32, normal, same
from tests.models.nested import C, Two, call, descriptions, floats64, made, shapes

ULP = float(np.finfo(np.float32).eps)
THEIRS: Any = eqx.nn
# Makes this package's layers of the arguments of Equinox's.
OURS: Any = SimpleNamespace(BatchNorm=eqx_norm.BatchNorm, LayerNorm=eqx_norm.LayerNorm)
NORMS = (eqx.nn.BatchNorm, eqx.nn.LayerNorm)


def make(mode: Any = "batch", **kwargs: Any) -> Any:
    return eqx.nn.make_with_state(eqx.nn.BatchNorm)(C, "batch", mode=mode, **kwargs)


def with_history(norm, state, seed, steps, members=0):
    """Returns the state of a norm after so many batches, as Equinox has it in float32, and the
    average of their means and variances, in float64."""
    random = np.random.RandomState(seed)
    shape = (members, C) if members else (C,)
    m = norm.momentum
    history = [
        (random.normal(0, 2, shape), random.uniform(0.1, 10, shape)) for _ in range(steps)
    ]
    if norm.mode == "batch":
        mean, variance = f32(np.zeros(shape)), f32(np.ones(shape))
        average, weight = np.zeros((2, *shape)), 0.0
        for batch in history:
            mean = mean * m + f32(batch[0]) * (1 - m)
            variance = variance * m + f32(batch[1]) * (1 - m)
            average = m * average + (1 - m) * np.array(batch)
            weight = m * weight + (1 - m)
        counter = norm.batch_counter
        state = state.set(counter, jnp.full_like(state.get(counter), steps))
        state = state.set(norm.batch_state_index, (mean, variance))
        return state, average / weight if steps else np.array([0 * mean, 1 + 0 * mean])
    if steps:
        state = state.set(norm.ema_first_time_index, jnp.zeros(shape[:-1], bool))
        state = state.set(norm.ema_state_index, tuple(map(f32, history[0])))
        return state, np.array(history[0])
    return state, np.array([np.zeros(shape), np.ones(shape)])


def inferred(norm, state):
    """Returns the mean and the variance of inference, of an ensemble, too."""

    def infer(memory):
        used = norm.approach.infer(memory)
        return used.mean, used.variance

    memory = state.get(norm.memory_index)
    return jax.vmap(infer)(memory) if memory.weight.ndim else infer(memory)


@pytest.mark.x32  # the statistics that it writes are of 32 bits
@hypothesis.given(descriptions, st.sampled_from([0, 2]), st.integers(0, 40))
@hypothesis.settings(max_examples=12)
def test_is_the_model_built_with_these_layers(description, members, steps):
    model, state = made(description, THEIRS, members)
    right = {}
    for seed, (path, norm) in enumerate(found(model, eqx.nn.BatchNorm).items()):
        state, right[path] = with_history(norm, state, seed, steps, members)
    new, new_state = swap(model, state)
    assert shapes((new, new_state)) == shapes(made(description, OURS, members))
    assert shapes(unswap(new, new_state)) == shapes((model, state))
    norms = found(model, NORMS)
    assert swapped(model, new).keys() == norms.keys()
    for path, norm in found(new, NORMS).items():
        assert norm.weight is norms[path].weight
        assert norm.bias is norms[path].bias
    held, new_held = entries(state), entries(new_state)
    assert all(new_held[marker] is held[marker] for marker in {*held} & {*new_held})
    assert not any("batch_" in marker or "ema_" in marker for marker in new_held)
    for path, norm in found(new, eqx_norm.BatchNorm).items():
        counted = steps if norms[path].mode == "batch" else 0
        weight = 1 - norm.momentum**steps if counted else float(steps > 0)
        # Each step of Equinox's has rounded three times, as far back as it remembers, and all
        # that is divided by the weight.
        remembered = max(1, min(steps, 1 / (1 - norm.momentum)))
        tolerance = 3 * ULP * remembered / (weight or 1)
        for ours, exact in zip(inferred(norm, new_state), right[path], strict=True):
            np.testing.assert_allclose(ours, exact, rtol=tolerance, atol=10 * tolerance)
        memory = new_state.get(norm.memory_index)
        np.testing.assert_allclose(memory.weight, weight, rtol=1e-6)
        assert (np.asarray(new_state.get(norm.accepted_index)) == counted).all()
        assert not np.asarray(new_state.get(norm.rejected_index)).any()


def amplified(model, state, x):
    """Returns how far the outputs move where x moves by its roundings: a layer whose input has
    a small variance divides by it what the layers before it have rounded."""
    right, moved = call(model, state, x)[0], 0.0
    for seed in range(4):
        signs = np.random.RandomState(seed).choice([-1, 1], x.shape)
        y = call(model, state, x * f32(1 + 2 * ULP * signs))[0]
        moved = max(moved, float(np.abs(y - right).max()))
    return moved


@pytest.mark.x32  # Equinox's layer promotes
@hypothesis.given(descriptions, st.sampled_from([0, 2]))
@hypothesis.settings(max_examples=5)
def test_outputs_are_the_same(description, members):
    model, state = made(description, THEIRS, members)
    model = eqx.nn.inference_mode(model, value=False)
    shape = (members, 8, C) if members else (8, C)
    for step in range(2):
        _, state = call(model, state, normal(step, shape, 0.5))
    ours = swap(model, state)
    x = normal(2, shape, 0.5)
    (y, our_state), (right, their_state) = call(*ours, x), call(model, state, x)
    tolerance = 1e-6 * max(1, np.abs(right).max()) + 8 * amplified(model, state, x)
    np.testing.assert_allclose(y, right, rtol=0, atol=tolerance)
    ours, theirs = (eqx.nn.inference_mode(m) for m in (ours[0], model))
    if all(n.mode == "ema" for n in found(model, eqx.nn.BatchNorm).values()):
        y, right = call(ours, our_state, x)[0], call(theirs, their_state, x)[0]
        tolerance += 8 * amplified(theirs, their_state, x)
        np.testing.assert_allclose(y, right, rtol=0, atol=tolerance)


# --- Statistics


def equinox_s(norm, state):
    """Returns the mean and the variance of inference in Equinox's layer."""
    mean, variance = state.get(norm.ema_state_index or norm.batch_state_index)
    if norm.mode == "ema":
        return mean, variance
    count = state.get(norm.batch_counter)
    scale = jnp.where(count == 0, 1, 1 - norm.momentum**count)
    return mean / scale, variance / scale


@pytest.mark.x32
@pytest.mark.parametrize("steps", [0, 1, 7, 3000])
@pytest.mark.parametrize("mode", ["batch", "ema"])
def test_inference_is_kept_to_the_bit(mode, steps):
    norm, state = make(mode)
    state, _ = with_history(norm, state, 0, steps)
    ours, our_state = swap(norm, state, keep_inference=True)
    if steps or mode == "batch":  # before any batch Equinox's "ema" has a variance of 0
        assert same(inferred(ours, our_state), equinox_s(norm, state))
    if steps == 3000:  # its start is forgotten
        for a, b in zip(inferred(*swap(norm, state)), equinox_s(norm, state), strict=True):
            np.testing.assert_allclose(a, b, rtol=2 * ULP)


@pytest.mark.x32
def test_after_one_batch_the_variance_is_that_of_the_batch():
    norm, state = make()
    x = normal(0, (64, C), 3, 2)
    _, state = call(norm, state, x)
    assert equinox_s(norm, state)[1].min() > 90  # what is wrong in Equinox
    mean, variance = inferred(*swap(norm, state))
    np.testing.assert_allclose(mean, floats64(x).mean(0), rtol=1e-5)
    np.testing.assert_allclose(variance, floats64(x).var(0), rtol=1e-5)
    kept = inferred(*swap(norm, state, keep_inference=True))
    assert same(kept, equinox_s(norm, state))


@pytest.mark.x32
def test_training_goes_on_as_if_it_had_begun_with_this_layer():
    norm, state = make(momentum=0.9)
    ours, right = eqx.nn.make_with_state(eqx_norm.BatchNorm)(
        C, "batch", momentum=0.9, approach="batch"
    )
    for step in range(3):
        x = normal(step, (16, C), step, 2)
        state, right = call(norm, state, x)[1], call(ours, right, x)[1]
    swapped_layer, taken = swap(norm, state)
    x = normal(9, (16, C), 3, 2)
    taken, right = call(swapped_layer, taken, x)[1], call(ours, right, x)[1]
    for a, b in zip(jax.tree.leaves(taken), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("mode", ["batch", "ema"])
def test_statistics_that_were_put_there_are_taken_as_they_are(mode):
    """As those of PyTorch are: without a count of batches that would say how."""
    norm, state = make(mode)
    index = norm.batch_state_index or norm.ema_state_index
    put = tuple(v.astype(state.get(index)[0].dtype) for v in (f32([1, 2, 3]), f32([4, 5, 6])))
    state = state.set(index, put)
    ours, our_state = swap(norm, state)
    assert same(inferred(ours, our_state), put)
    assert our_state.get(ours.memory_index).weight == 1


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.complex64])
@pytest.mark.parametrize("mode", ["batch", "ema"])
def test_dtypes(mode, dtype):
    norm, state = make(mode, dtype=dtype)
    ours, our_state = swap(norm, state)
    right = eqx.nn.make_with_state(eqx_norm.BatchNorm)(C, "batch", mode=mode, dtype=dtype)
    assert shapes((ours, our_state)) == shapes(right)
    assert ours.weight.dtype == dtype
    if mode == "batch":
        state = state.set(norm.batch_counter, jnp.full_like(state.get(norm.batch_counter), 8))
        _, variance = inferred(*swap(norm, state))
        assert (np.asarray(variance) >= 0).all()  # 1 - m^8 is more than all there is


def test_several_leading_axes():
    make_two = eqx.filter_vmap(lambda _: make("batch"))
    norm, state = eqx.filter_vmap(lambda _: make_two(jnp.zeros(2)))(jnp.zeros(4))
    ours, our_state = swap(norm, state, "ema")
    memory = our_state.get(ours.memory_index)
    assert (memory.mean.shape, memory.weight.shape) == ((4, 2, C), (4, 2))
    norm, state = unswap(ours, our_state)
    assert state.get(norm.ema_state_index)[0].shape == (4, 2, C)


# --- What is shared, what is left


def test_layers_that_share_a_state_still_do():
    norm = eqx.nn.BatchNorm(C, "batch", mode="batch")
    model = Two(norm, [norm, eqx.nn.BatchNorm(C, "batch", mode="batch")])
    state, model = eqx.nn.State(model), eqx.nn.delete_init_state(model)
    new, new_state = swap(model, state)
    first, (second, third) = new.first, new.second
    assert first.memory_index.marker is second.memory_index.marker
    assert first.memory_index.marker is not third.memory_index.marker
    assert first.weight is second.weight
    assert len(entries(new_state)) == 6
    back, back_state = unswap(new, new_state)
    assert back.first.batch_counter.marker is back.second[0].batch_counter.marker
    assert len(entries(back_state)) == 4


def test_a_part_of_a_model_keeps_the_names_of_the_whole():
    model, state = made(
        [("BatchNorm", {"mode": "batch"}), ("BatchNorm", {"mode": "ema"})], THEIRS
    )
    new, new_state = swap(model[1], state)
    assert new.memory_index.marker == "list[1].memory_index"
    assert [*entries(new_state)][-2:] == ["list[0].batch_counter", "list[0].batch_state_index"]
    rest, rest_state = swap([model[0], new], new_state)
    assert shapes((rest, rest_state)) == shapes(swap(model, state))


def test_what_is_of_this_package_is_left_alone():
    description = [("BatchNorm", {"mode": "ema"}), ("LayerNorm", {})]
    model, state = made(description, OURS)
    new, new_state = swap(model, state, "batch", eps=0.1)
    assert eqx.tree_equal((model, state), (new, new_state))
    assert new[0].eps == 1e-5


def test_overrides_are_of_all_layers_that_have_them():
    description = [("BatchNorm", {"mode": "batch", "momentum": 0.9}), ("LayerNorm", {})]
    model, state = made(description, THEIRS)
    new, new_state = swap(
        model, state, "smooth_start", eps=1e-3, unbiased=True, activation=jax.nn.relu
    )
    assert new[0].approach == SmoothStart(0.9)
    assert new[0].unbiased
    for norm in new:
        assert norm.eps == 1e-3
        assert norm.activation(-1.0) == 0
    y, _ = call(new, new_state, normal(0, (4, C)))
    assert y.min() == 0
    assert swap(model, state, VarianceClip(Adam(0.5)))[0][0].momentum == 0.5
    assert swap(model, state, momentum=0.7)[0][0].approach == Batch(0.7)


def test_swaps_inside_of_jit():
    model, state = made([("BatchNorm", {"mode": "batch"})], THEIRS)
    swapped_there = eqx.filter_eval_shape(lambda m, s: swap(m, s, "ema"), model, state)
    assert jax.tree.structure(swapped_there[1]) == jax.tree.structure(
        swap(model, state, "ema")[1]
    )


def test_listing():
    model, state = made({"a": ("BatchNorm", {"mode": "ema"}), "b": ("LayerNorm", {})}, THEIRS)
    new, _ = swap(model, state)
    assert swapped(model, new) == {
        "['a']": "eqx.nn.BatchNorm(mode='ema') -> "
        "eqx_norm.BatchNorm(approach=Ema(momentum=0.99))",
        "['b']": "eqx.nn.LayerNorm() -> eqx_norm.LayerNorm()",
    }
    assert swapped(new, new) == {}


# --- Subclasses


class Named(eqx.nn.BatchNorm):
    name: str = "mine"


class Ours(eqx_norm.BatchNorm):
    pass


def test_a_subclass_is_refused_by_name():
    model, state = eqx.nn.make_with_state(lambda: [Named(C, "batch", mode="batch")])()  # type: ignore
    error = (
        r"^\[0\]: tests\.\S+\.Named is a subclass of eqx\.nn\.BatchNorm, with the fields name\."
    )
    with pytest.raises(ValueError, match=error):
        swap(model, state)
    new, _ = swap(model, state, subclasses=True)
    assert type(new[0]) is eqx_norm.BatchNorm
    model, state = eqx.nn.make_with_state(Ours)(C, "batch", approach="batch")  # type: ignore
    assert swap(model, state)[0] == model
    with pytest.raises(ValueError, match=r"^Ours: tests\.\S+\.Ours is a subclass, and what"):
        unswap(model, state)
    assert type(unswap(model, state, subclasses=True)[0]) is eqx.nn.BatchNorm


# --- The way back


@pytest.mark.parametrize("mode", ["batch", "ema"])
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_there_and_back(mode, steps):
    make_ours = eqx.nn.make_with_state(eqx_norm.BatchNorm)
    norm, state = make_ours(C, "batch", momentum=0.99, approach=mode)
    for step in range(steps):
        _, state = call(norm, state, normal(step, (16, C), 3, 2))
    theirs, their_state = unswap(norm, state)
    if steps:
        right = inferred(norm, state)
        for a, b in zip(equinox_s(theirs, their_state), right, strict=True):
            np.testing.assert_allclose(a, b, rtol=ULP)
    again, again_state = swap(theirs, their_state)
    assert again.approach == norm.approach
    for a, b in zip(inferred(again, again_state), inferred(norm, state), strict=True):
        np.testing.assert_allclose(a, b, rtol=2 * ULP)
    assert jax.tree.structure(again_state) == jax.tree.structure(state)


@pytest.mark.x32
def test_equinox_goes_on_training_what_came_back():
    norm, state = made(("BatchNorm", {"mode": "batch", "momentum": 0.9}), OURS)
    _, state = call(norm, state, normal(0, (16, C), 3, 2))
    (theirs, their_state), x = unswap(norm, state), normal(1, (16, C), 3, 2)
    (y, _), (right, _) = call(theirs, their_state, x), call(norm, state, x)
    np.testing.assert_allclose(y, right, atol=2e-6)


def test_what_equinox_does_not_have_is_refused():
    model, state = made([("BatchNorm", {"mode": "batch"})], OURS)
    clipped, clipped_state = reconfigure(model, state, approach="variance_clip")
    with pytest.raises(
        ValueError, match=r"^\[0\]: approach=VarianceClip\(.* mode='batch'\) or"
    ):
        unswap(clipped, clipped_state)
    theirs, _ = unswap(clipped, clipped_state, "ema")
    assert (theirs[0].mode, theirs[0].momentum) == ("ema", 0.99)
    active, active_state = reconfigure(model, state, activation=jnp.tanh)
    with pytest.raises(
        ValueError, match=r"^\[0\]: activation=.*reconfigure\(.*activation=None"
    ):
        unswap(active, active_state)
    with pytest.raises(ValueError, match="^mode='adam': eqx.nn.BatchNorm has mode='batch' and"):
        unswap(model, state, "adam")
    with pytest.raises(
        ValueError, match=r"^\[0\]: the state given holds nothing at 'list\[0\]"
    ):
        unswap(model, made(("Counter", {}), OURS)[1])


# --- Errors


def test_errors_name_the_layer():
    model, state = made([("BatchNorm", {"mode": "batch"})], THEIRS)
    with pytest.raises(
        ValueError, match=r"^\[0\]: the state given holds nothing at 'list\[0\]"
    ):
        swap(model, made(("Counter", {}), THEIRS)[1])
    with pytest.raises(ValueError, match="^dtype= cannot be changed in a layer that exists"):
        swap(model, state, dtype=jnp.float16)
    with pytest.raises(ValueError, match=r"^\[0\]: approach='bach' is not known"):
        swap(model, state, "bach")
    for bad, error in (({"eps": 0.0}, "eps=0.0"), ({"momentum": 1.0}, "momentum=1.0")):
        model, state = made([("BatchNorm", {"mode": "batch", **bad})], THEIRS)
        with pytest.raises(ValueError, match=rf"^\[0\]: {error}: "):
            swap(model, state)
    cut = Two(None, make()[0])
    cut = eqx.nn.Shared(
        Two(cut.second, cut.second),
        lambda t: t.first.batch_state_index,
        lambda t: t.second.batch_state_index,
    )
    with pytest.raises(ValueError, match="^pytree.first: its batch_state_index is SharedNode"):
        swap(cut, make()[1])


# --- Checkpoints


@pytest.mark.x32
def test_checkpoints_are_those_of_a_model_with_these_layers():
    description = [("BatchNorm", {"mode": "batch"}), ("SpectralNorm", {}), ("LayerNorm", {})]
    model, state = made(description, THEIRS)
    _, state = call(model, state, normal(0, (8, C)))
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, (model, state))
    file.seek(0)
    # The three lines.
    model, state = made(description, THEIRS)
    model, state = eqx.tree_deserialise_leaves(file, (model, state))
    model, state = swap(model, state)
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, (model, state))
    file.seek(0)
    read = eqx.tree_deserialise_leaves(file, made(description, OURS))
    assert eqx.tree_equal(read, (model, state), typematch=True)


def test_the_examples_in_the_docstrings(tmp_path, capsys):
    def build(key):
        return eqx.nn.Sequential([eqx.nn.BatchNorm(C, "batch", mode="ema")])

    key, path = jax.random.key(0), tmp_path / "model.eqx"
    before = eqx.nn.make_with_state(build)(key)
    eqx.tree_serialise_leaves(path, before)
    names = example(swap, **globals(), build=build, key=key, path=path)
    assert type(names["model"].layers[0]) is eqx_norm.BatchNorm
    example(swapped, **globals(), before=before[0], after=names["model"])
    assert capsys.readouterr().out.startswith("layers[0] eqx.nn.BatchNorm(mode='ema') -> eqx_n")
    example(unswap, **globals(), model=names["model"], state=names["state"], path=path)
    assert shapes(eqx.tree_deserialise_leaves(path, before)) == shapes(before)
