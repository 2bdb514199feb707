"""Tests that a reconfigured model is the one made with these settings, and infers as before."""

from typing import Any

import equinox as eqx
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from eqx_norm import BatchNorm, LayerNorm
from eqx_norm.models import reconfigure
from eqx_norm.models._layers import entries
from eqx_norm.strategies import Accumulated, Batch, Ema, Moments, SmoothStart, VarianceClip
from tests.helpers import APPROACHES, Cumulative, example, f32, make, normal, same
from tests.models.nested import C, Two, call, shapes


def build(approach: Any = "batch", unbiased=False, eps=1e-5) -> list[Any]:
    return [
        BatchNorm(C, "batch", approach=approach, unbiased=unbiased, eps=eps),
        {"row": LayerNorm(C, eps=eps)},
    ]


def trained(approach: Any = "batch", members=0, steps=2) -> Any:
    def make(_):
        return eqx.nn.make_with_state(build)(approach)

    model, state = eqx.filter_vmap(make)(jnp.zeros(members)) if members else make(None)
    for step in range(steps):
        shape = (members, 8, C) if members else (8, C)
        _, state = call(model, state, normal(step, shape, 3, 2))
    return model, state


def memory(model, state) -> Any:
    return state.get(model[0].memory_index)


wrapped = {"clipped": VarianceClip(SmoothStart(0.9)), "accumulated": Accumulated(Batch(0.9))}
approaches = st.sampled_from([*APPROACHES, *wrapped]).map(lambda name: wrapped.get(name, name))


@hypothesis.given(approaches, approaches, st.sampled_from([0, 2]), st.sampled_from([0, 2]))
@hypothesis.settings(max_examples=10)
def test_is_the_model_made_with_it_and_infers_as_before(old, new, members, steps):
    model, state = trained(old, members, steps)
    other, other_state = reconfigure(model, state, approach=new, eps=1e-3)
    right: Any = trained(new, members, 0)
    if isinstance(new, str):  # the momentum is kept
        right = reconfigure(*right, momentum=model[0].momentum)
    assert shapes((other, other_state)) == shapes(reconfigure(*right, eps=1e-3))
    x = normal(9, (members, 8, C) if members else (8, C), 3, 2)
    before, after = (
        call(eqx.nn.inference_mode(reconfigure(m, s, eps=1e-5)[0]), s, x)[0]
        for m, s in ((model, state), (other, other_state))
    )
    assert same(before, after)
    if not steps:
        assert same(entries(other_state), entries(right[1]))
    for index in (model[0].accepted_index, model[0].rejected_index):
        assert same(state.get(index), other_state.get(index))


def test_ema_gives_everything_weight_1():
    model, state = trained("batch")
    assert memory(model, state).weight < 0.1
    ema, ema_state = reconfigure(model, state, approach="ema")
    assert memory(ema, ema_state).weight == 1
    assert same(memory(ema, ema_state).mean_rest, memory(model, state).mean_rest)
    back, back_state = reconfigure(ema, ema_state, approach="adam")
    assert memory(back, back_state).weight == 1


def test_between_the_others_the_memory_stays_as_it_is():
    model, state = trained("batch")
    for approach in ("adam", "smooth_start", "variance_clip", VarianceClip(Batch(0.5))):
        assert same(memory(*reconfigure(model, state, approach=approach)), memory(model, state))


def test_the_momentum_is_told_truly():
    model, state = trained("variance_clip")
    slow, _ = reconfigure(model, state, momentum=0.9)
    assert (slow[0].momentum, slow[0].approach) == (0.9, VarianceClip(Batch(0.9)))
    other, _ = reconfigure(slow, state, approach="ema")
    assert (other[0].momentum, other[0].approach) == (0.9, Ema(0.9))
    other, _ = reconfigure(slow, state, approach="ema", momentum=0.5)
    assert (other[0].momentum, other[0].approach) == (0.5, Ema(0.5))
    other, _ = reconfigure(slow, state, approach=Ema(0.3))
    assert other[0].momentum == 0.3


def test_other_settings():
    model, state = trained()
    other, other_state = reconfigure(
        model,
        state,
        unbiased=True,
        activation=jax.nn.relu,
        axis_name=["batch", "devices"],
        implementation="xla",
    )
    assert other[0].unbiased
    assert other[0].axis_name == ("batch", "devices")
    assert [n.implementation for n in (other[0], other[1]["row"])] == ["xla", "xla"]
    assert other[1]["row"].activation(-1.0) == other[0].activation(-1.0) == 0
    assert other[0].weight is model[0].weight
    assert other[1]["row"].bias is model[1]["row"].bias
    assert same(state, other_state)


def test_where_chooses():
    model, state = trained()
    seen = {}

    def where(path, layer):
        seen[path] = type(layer)
        return path.endswith("['row']")

    other, _ = reconfigure(model, state, where, eps=0.1)
    assert seen == {"[0]": BatchNorm, "[1]['row']": LayerNorm}
    assert (other[0].eps, other[1]["row"].eps) == (1e-5, 0.1)
    assert other[0] is model[0]


# --- Strategies of a user's own


class Loading(Cumulative):
    def load(self, learnt):
        return Moments.of(learnt.mean, learnt.memory_variance, learnt.mean_rest)


def test_a_strategy_of_one_s_own_is_loaded():
    model, state = trained()
    other, other_state = reconfigure(model, state, approach=Loading())
    assert other[0].momentum is None
    x = normal(3, (8, C))
    y, right = (
        call(eqx.nn.inference_mode(m), s, x)[0]
        for m, s in ((other, other_state), (model, state))
    )
    assert same(y, right)
    back, back_state = reconfigure(other, other_state, approach="batch")
    assert back[0].approach == Batch()  # it had no momentum
    assert memory(back, back_state).weight == 1
    assert same(
        memory(*reconfigure(other, other_state, approach=Loading())), memory(other, other_state)
    )


def test_one_that_cannot_load_can_start():
    other, other_state = reconfigure(*trained(steps=0), approach=Cumulative())
    assert shapes((other, other_state)) == shapes(trained(Cumulative(), steps=0))
    with pytest.raises(ValueError, match=r"^\[0\]: Cumulative cannot take over statistics"):
        reconfigure(*trained(), approach=Cumulative())


def test_members_without_a_batch_stay_new():
    model, state = trained(members=2)
    held = memory(model, state)
    new = jax.tree.map(lambda a: a.at[1].set(0), held)
    state = state.set(model[0].memory_index, new)
    loaded = memory(*reconfigure(model, state, approach=Loading()))
    np.testing.assert_array_equal(loaded.count, [1, 0])
    other = memory(*reconfigure(model, state, approach="ema"))
    np.testing.assert_array_equal(other.weight, [1, 0])


def test_inside_of_jit():
    model, state = trained()
    other, other_state = eqx.filter_jit(reconfigure)(model, state, approach="ema")
    assert same(memory(other, other_state).mean, memory(model, state).mean)


# --- Errors


class Own(BatchNorm):
    extra: int = 1


class Plain(BatchNorm):
    pass


def test_errors():
    model, state = trained()
    with pytest.raises(ValueError, match=r"^input_size= cannot be changed in a layer that exi"):
        reconfigure(model, state, input_size=4)
    with pytest.raises(ValueError, match=r"`where` is false for all that there are: '\[0\]', "):
        reconfigure(model, state, lambda path, layer: False, eps=1.0)
    with pytest.raises(ValueError, match=r"The model has none of this package; eqx_norm\.swap"):
        reconfigure(*eqx.nn.make_with_state(eqx.nn.BatchNorm)(C, "batch", mode="ema"), eps=1.0)
    with pytest.raises(
        ValueError, match=r"^approach= is a setting of BatchNorm, but only Laye"
    ):
        reconfigure(model, state, lambda path, layer: "row" in path, approach="ema")
    with pytest.raises(ValueError, match=r"^\[0\]: eps=0.0: what has variance 0"):
        reconfigure(model, state, eps=0.0)
    with pytest.raises(ValueError, match=r"^\[0\]: approach='bach' is not known"):
        reconfigure(model, state, approach="bach")
    with pytest.raises(ValueError, match=r"^\[0\]: momentum=0.5: the approach Cumulative"):
        reconfigure(model, state, approach=Cumulative(), momentum=0.5)
    with pytest.raises(
        ValueError, match=r"^\[0\]: the state given holds nothing of this layer"
    ):
        reconfigure(model, make(C, "batch", approach="batch")[1], eps=1.0)
    wide = eqx.nn.make_with_state(lambda: [BatchNorm(C + 1, "batch", approach="batch")])()[1]
    with pytest.raises(ValueError, match=r"^\[0\]: the state given belongs to another layer"):
        reconfigure(model, wide, approach="ema")
    assert same(memory(model, state), memory(*reconfigure(model, state, eps=1.0)))


def test_subclasses():
    made_own: Any = eqx.nn.make_with_state(Own)
    with pytest.raises(ValueError, match=r"^Own: Own is a subclass of BatchNorm with extra of"):
        reconfigure(*made_own(C, "batch", approach="batch"), eps=1.0)
    made_plain: Any = eqx.nn.make_with_state(Plain)
    plain, _ = reconfigure(*made_plain(C, "batch", approach="batch"), approach="ema")
    assert type(plain) is Plain


def test_layers_that_share_a_state_change_together():
    norm = BatchNorm(C, "batch", approach="batch")
    model = Two(norm, norm)
    state, model = eqx.nn.State(model), eqx.nn.delete_init_state(model)
    both, both_state = reconfigure(model, state, approach=Accumulated(Batch()))
    assert both.first.memory_index.marker is both.second.memory_index.marker
    assert len(entries(both_state)) == 3
    for chosen in ("first", "second"):
        with pytest.raises(ValueError, match=rf"^{chosen} and \w+ share one state, and only"):
            reconfigure(model, state, lambda path, _, c=chosen: path == c, approach="ema")
    reconfigure(model, state, lambda path, _: path == "first", eps=1.0)


def test_complex():
    norm, state = make(C, "batch", approach="batch", dtype=jnp.complex64)
    x = jax.lax.complex(f32(normal(0, (8, C))), f32(normal(1, (8, C))))
    _, state = call(norm, state, x)
    other, other_state = reconfigure(norm, state, approach=Loading())
    assert jnp.iscomplexobj(other_state.get(other.memory_index).mean)


def test_the_example_in_the_docstring():
    norms = eqx.nn.make_with_state(
        lambda: eqx.nn.Sequential([BatchNorm(C, "batch", approach="batch") for _ in range(2)])
    )
    model, state = norms()
    names = example(reconfigure, **globals(), model=model, state=state)
    assert names["model"].layers[0].approach == SmoothStart(0.9)
    assert [n.activation is None for n in names["model"].layers] == [True, False]
