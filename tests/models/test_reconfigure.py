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
from eqx_norm.strategies import (
    AbstractStrategy,
    Accumulated,
    Batch,
    Cumulative,
    Ema,
    Frozen,
    Moments,
    SmoothStart,
    VarianceClip,
)
from tests.helpers import APPROACHES, example, normal, same
from tests.helpers import Cumulative as Unloaded
from tests.models.nested import OURS, C, Two, call, inferred, made, shapes, unchecked


class Loading(Unloaded):
    """Is a strategy of a user's own that remembers no `Running`, and can load."""

    def load(self, learnt):
        return Moments.of(learnt.mean, learnt.memory_variance, learnt.mean_rest)


def trained(approach: Any = "batch", members=0, steps=2) -> Any:
    def make(_):
        norm = BatchNorm(C, "batch", approach=approach)
        return eqx.nn.make_with_state(lambda: [norm, {"row": LayerNorm(C)}])()

    model, state = eqx.filter_vmap(make)(jnp.zeros(members)) if members else make(None)
    for step in range(steps):
        _, state = call(model, state, normal(step, (members, 8, C)[not members :], 3, 2))
    return model, state


def memory(model, state) -> Any:
    return state.get(model[0].memory_index)


WRAPPED: dict[str, AbstractStrategy[Any]] = {
    "clipped": VarianceClip(SmoothStart(0.9)),
    "accumulated": Accumulated(Batch(0.9), every=2),
    "accumulated, clipped": Accumulated(VarianceClip(Ema(0.9)), every=3),
    "frozen": Frozen(Batch(0.9)),
    "cumulative": Cumulative(),
    "own": Loading(),
    "own that cannot load": Unloaded(),
}
RUNNING = {*APPROACHES, "clipped", "frozen"}
names = st.sampled_from([*APPROACHES, *WRAPPED])


@hypothesis.given(names, names, st.sampled_from([0, 2]), st.sampled_from([0, 3]))
@hypothesis.settings(max_examples=15)
def test_is_the_model_made_with_it_and_infers_as_before(old, new, members, steps):
    hypothesis.assume("cannot" not in new or not steps or old == new)
    model, state = trained(WRAPPED.get(old, old), members, steps)
    approach = WRAPPED.get(new, new)
    other, other_state = reconfigure(model, state, approach=approach, eps=1e-3)
    right: Any = trained(approach, members, 0)
    if isinstance(approach, str) and model[0].momentum is not None:  # it is kept
        right = reconfigure(*right, momentum=model[0].momentum)
    assert shapes((other, other_state)) == shapes(reconfigure(*right, eps=1e-3))
    x = normal(9, (members, 8, C)[not members :], 3, 2)
    before, after = (
        call(eqx.nn.inference_mode(reconfigure(m, s, eps=1e-5)[0]), s, x)[0]
        for m, s in ((model, state), (other, other_state))
    )
    assert same(before, after)
    if {old, new} <= RUNNING:
        assert same(state, other_state)
    if not steps:  # also one that cannot load can start
        assert same(entries(other_state), entries(right[1]))
    assert same(*(s.get(model[0].rejected_index) for s in (state, other_state)))


def test_ema_goes_on_from_few_batches_of_another_approach():
    model, state = trained("batch", steps=2)
    ema, state = reconfigure(model, state, approach="ema", momentum=0.7)
    held, x = memory(model, state), normal(7, (8, C), 1, 3)
    assert held.weight < 0.1
    after = memory(ema, call(ema, state, x)[1])
    for ours, before, batch in (
        (after.mean, held.mean, x.mean(0)),
        (after.variance, held.variance, x.var(0)),
    ):
        np.testing.assert_allclose(ours, 0.7 * before + 0.3 * batch, rtol=1e-5)


def test_what_is_wrapped_keeps_its_memory_to_the_bit():
    """A strategy that remembers in its own way is not loaded for it: that would lose counts."""
    for approach in (Cumulative(), Loading(), Unloaded()):
        model, state = trained(approach)
        wrapped = reconfigure(model, state, approach=lambda s: Accumulated(s, every=2))
        assert same(memory(*wrapped).remembered, memory(model, state))
        back = reconfigure(*wrapped, approach=approach)
        assert eqx.tree_equal(back, (model, state))


@pytest.mark.parametrize("every", [1, 3])
def test_after_accumulated_what_is_pending_is_dropped_and_only_batches_count(every):
    wrap = {"approach": lambda strategy: Accumulated(strategy, every=every)}
    model, state = reconfigure(*trained("batch", steps=2), **wrap)
    for step in range(5):
        _, state = call(model, state, normal(step, (8, C)))
    back, back_state = reconfigure(model, state, approach="batch")
    assert int(back_state.get(back[0].accepted_index)) == 2 + 5 // every
    assert same(memory(back, back_state), memory(model, state).remembered)
    other, other_state = reconfigure(
        model, state, approach=lambda s: Accumulated(s.strategy, 2)
    )
    assert (other[0].approach, memory(other, other_state).batches) == (
        Accumulated(Batch(), 2),
        0,
    )
    assert int(other_state.get(other[0].accepted_index)) == 2 + 5 // every


def test_the_momentum_is_told_truly():
    model, state = trained("variance_clip")
    slow, _ = reconfigure(model, state, momentum=0.9)
    assert (slow[0].momentum, slow[0].approach) == (0.9, VarianceClip(Batch(0.9)))

    cases: list[tuple[dict[str, Any], Any]] = [
        ({"approach": "ema"}, Ema(0.9)),
        ({"approach": "ema", "momentum": 0.5}, Ema(0.5)),
        ({"approach": Ema(0.3)}, Ema(0.3)),
        ({"approach": Loading()}, Loading()),
        ({"approach": lambda s: Accumulated(s.strategy, 2)}, Accumulated(Batch(0.9), 2)),
        ({"approach": Frozen(Batch(0.5)), "momentum": 0.8}, Frozen(Batch(0.8))),
    ]
    for given, right in cases:
        other, _ = reconfigure(slow, state, **given)
        assert other[0].approach == right
        assert other[0].momentum == getattr(right, "momentum", None)


def test_other_settings_of_the_layers_that_where_chooses():
    model, state = trained()
    settings = {"unbiased": True, "axis_name": ["batch", "devices"], "implementation": "xla"}
    other, after = reconfigure(model, state, activation=jax.nn.relu, **settings)
    batch, row = other[0], other[1]["row"]
    assert (batch.unbiased, batch.axis_name) == (True, ("batch", "devices"))
    assert (batch.implementation, row.implementation) == ("xla", "xla")
    assert row.activation(-1.0) == batch.activation(-1.0) == 0
    assert (batch.weight is model[0].weight) & (row.bias is model[1]["row"].bias)
    assert same(state, after)
    other, _ = reconfigure(model, state, lambda path, n: isinstance(n, LayerNorm), eps=0.1)
    assert (other[0], other[1]["row"].eps) == (model[0], 0.1)


def test_members_without_a_batch_stay_new():
    model, state = trained(members=2)
    new = jax.tree.map(lambda a: a.at[1].set(0), memory(model, state))
    state = state.set(model[0].memory_index, new)
    loaded = reconfigure(model, state, approach=Loading())
    np.testing.assert_array_equal(memory(*loaded).count, [1, 0])
    assert same(inferred(loaded[0][0], loaded[1]), inferred(model[0], state))


def test_inside_of_jit():
    model, state = trained()
    for approach in ("ema", Loading()):
        compiled = eqx.filter_jit(reconfigure)(model, state, approach=approach)
        assert eqx.tree_equal(compiled, reconfigure(model, state, approach=approach))


def test_layers_that_share_a_state_change_together():
    norm = BatchNorm(C, "batch", approach="batch")
    model = Two(norm, norm)
    state, model = eqx.nn.State(model), eqx.nn.delete_init_state(model)
    both, both_state = reconfigure(model, state, approach=Accumulated(Batch(), every=2))
    assert both.first.memory_index.marker is both.second.memory_index.marker
    assert len(entries(both_state)) == 3
    # One that was not chosen says so when it is called.
    one, state = reconfigure(model, state, lambda path, _: path == "first", approach=Loading())
    with pytest.raises(ValueError, match="belongs to another layer"):
        call(one.second, state, normal(0, (8, C)))


class Own(BatchNorm):
    """Is a user's subclass, with a field and a signature of its own."""

    extra: int

    def __init__(self, extra):
        super().__init__(C, "batch", approach="batch")
        self.extra = extra


def test_a_subclass_stays_what_it_is():
    own, _ = reconfigure(*eqx.nn.make_with_state(Own)(7), approach="ema", eps=1.0)
    assert (type(own), own.extra, own.eps, own.approach) == (Own, 7, 1.0, Ema())


ROW: Any = lambda path, _: "row" in path  # noqa: E731
WRONG: list[tuple[Any, str]] = [
    ({"input_size": 4}, "^input_size= cannot be changed in a layer that exists"),
    ({"where": lambda *_: False, "eps": 1.0}, r"where= took none of \[0\], \[1\]\['row'\]"),
    ({"where": "[0]", "eps": 1.0}, r"^where='\[0\]'"),
    ({"where": ROW, "approach": "ema"}, "^approach= is a setting of BatchNorm"),
    ({"eps": 0.0}, r"^\[0\]: eps=0.0: "),
    ({"approach": "bach"}, r"^\[0\]: approach='bach' is not known"),
    ({"approach": lambda strategy: 3}, r"^\[0\]: approach=3 is neither a name nor a strat"),
    ({"approach": Batch}, r"^\[0\]: approach=<class .* with the parentheses"),
    ({"approach": Loading(), "momentum": 0.5}, r"^\[0\]: momentum=0.5: .*Loading"),
    ({"approach": Unloaded()}, r"^\[0\]: Cumulative cannot take over statistics"),
    ({"model": made(("Linear", {}), OURS)[0], "eps": 1.0}, r"no layer of eqx_norm; .*swap\("),
    ({"state": made(("Linear", {}), OURS)[1], "eps": 1.0}, r"^\[0\]: .*another model"),
    ({"state": trained(Loading())[1], "approach": "ema"}, r"^\[0\]: .*another layer"),
]


@pytest.mark.parametrize(("given", "error"), WRONG, ids=[error for _, error in WRONG])
def test_errors_name_the_layer(given, error):
    model, state = trained()
    with unchecked(), pytest.raises(ValueError, match=error):
        reconfigure(**{"model": model, "state": state, **given})


def test_the_example_in_the_docstring():
    norms = [BatchNorm(C, "batch", approach="batch") for _ in range(2)]
    model, state = eqx.nn.make_with_state(eqx.nn.Sequential)(norms)
    layers = example(reconfigure, **globals(), model=model, state=state)["model"].layers
    assert [n.approach for n in layers] == [SmoothStart(0.9), SmoothStart(0.9)]
    assert [n.activation is None for n in layers] == [True, False]
