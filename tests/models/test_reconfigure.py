"""Tests that a reconfigured model is the one made with these settings, and infers as before."""

from typing import Any

import equinox as eqx
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from eqx_norm import BatchNorm, GroupNorm, LayerNorm, RMSNorm
from eqx_norm.models import freeze, reconfigure
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
from tests.models.nested import OURS, C, call, made, shapes, unchecked


class Loading(Unloaded):
    """Is a user's strategy with its own kind of memory, which can load."""

    def load(self, learnt):
        return Moments.of(learnt.mean_pair, learnt.memory_variance)


def trained(approach: Any = "batch", members=0, steps=2) -> Any:
    def make(_):
        norm = BatchNorm(C, "batch", approach=approach)
        return eqx.nn.make_with_state(lambda: [norm, {"row": LayerNorm(C)}])()

    model, state = eqx.filter_vmap(make)(jnp.zeros(members)) if members else make(None)
    for step in range(steps):
        _, state = call(model, state, normal(step, (members, 8, C)[not members :], 3, 2))
    return model, state


def memory(model, state) -> Any:
    return state.get(model[0].memory_index).statistics


WRAPPED: dict[str, AbstractStrategy[Any]] = {
    "clipped": VarianceClip(SmoothStart(0.9)),
    "accumulated": Accumulated(Batch(0.9), every=2),
    "frozen": Frozen(Batch(0.9)),
    "cumulative": Cumulative(),
    "own": Loading(),
}
RUNNING = {*APPROACHES, "clipped", "frozen"}
names = st.sampled_from([*APPROACHES, *WRAPPED])


@hypothesis.given(names, names, st.sampled_from([0, 2]), st.sampled_from([0, 3]))
@hypothesis.settings(max_examples=15)
def test_is_the_model_made_with_it_and_infers_as_before(old, new, members, steps):
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
    if not steps:
        assert same(entries(other_state), entries(right[1]))


def test_what_is_wrapped_keeps_its_memory_to_the_bit():
    """A layer keeps its memory if its strategy stays: loading it would lose counts."""
    for approach in (Cumulative(), Loading(), Unloaded()):
        model, state = trained(approach)
        wrapped = reconfigure(model, state, approach=lambda s: Accumulated(s, every=2))
        assert same(memory(*wrapped).remembered, memory(model, state))
        back = reconfigure(*wrapped, approach=approach)
        assert eqx.tree_equal(back, (model, state))


@pytest.mark.parametrize("new", [Batch(), Accumulated(Batch(), every=2)], ids=str)
def test_after_accumulated_what_is_pending_is_dropped_and_only_batches_count(new):
    model, state = trained(Accumulated(Batch(), every=3), steps=5)
    other, other_state = reconfigure(model, state, approach=new)
    assert other_state.get(other[0].memory_index).accepted == 1
    learnt = memory(other, other_state)
    held = getattr(learnt, "remembered", learnt)
    assert same(held, memory(model, state).remembered)
    assert held is learnt or learnt.batches == 0


def test_the_momentum_is_told_truly():
    model, state = trained("variance_clip")
    slow, _ = reconfigure(model, state, momentum=0.9)
    assert (slow[0].momentum, slow[0].approach) == (0.9, VarianceClip(Batch(0.9)))

    cases: list[Any] = [
        ({"approach": "ema", "momentum": 0.5}, Ema(0.5)),
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
    settings = {"unbiased": True, "axis_name": ["batch", "devices"]}
    other, after = reconfigure(model, state, activation=jax.nn.relu, **settings)
    batch, row = other[0], other[1]["row"]
    assert (batch.unbiased, batch.axis_name) == (True, ("batch", "devices"))
    assert row.activation(-1.0) == batch.activation(-1.0) == 0
    assert (batch.weight is model[0].weight) & (row.bias is model[1]["row"].bias)
    assert same(state, after)
    other, _ = reconfigure(model, state, lambda path, n: isinstance(n, LayerNorm), eps=0.1)
    assert (other[0], other[1]["row"].eps) == (model[0], 0.1)


def test_norms_of_one_example():
    model, state = [RMSNorm(C), GroupNorm(1, C)], eqx.nn.State(())
    (rms, group), _ = reconfigure(model, state, implementation="xla", eps=0.1)
    assert (rms.implementation, group.implementation) == ("xla", "xla")
    assert (rms.eps, group.eps) == (0.1, 0.1)


ROW: Any = lambda path, _: "row" in path  # noqa: E731
WRONG: list[tuple[Any, str]] = [
    ({"input_size": 4}, "^input_size= cannot be changed in an existing layer"),
    ({"where": lambda *_: 0, "eps": 1.0}, r"where= chose none of \[0\], \[1\]\['row'\]"),
    ({"where": ROW, "approach": "ema"}, "^approach= is a setting of BatchNorm"),
    ({"approach": lambda strategy: 3}, r"^\[0\]: approach=3 is neither a name nor a strat"),
    ({"approach": Batch}, r"^\[0\]: approach=<class .* with the parentheses"),
    ({"axis_name": ("b", "b")}, r"^\[0\]: axis_name=\('b', 'b'\) names 'b' more than once"),
    ({"approach": Loading(), "momentum": 0.5}, r"^\[0\]: momentum=0.5: .*Loading"),
    ({"approach": Unloaded()}, r"^\[0\]: Cumulative cannot take over"),
    ({"model": made(("Linear", {}), OURS)[0], "eps": 1.0}, r"no layer of eqx_norm; .*swap\("),
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


class Doubled(BatchNorm):
    factor: int = 2

    def __call__(self, x, state, **kwargs):
        y, state = super().__call__(x, state, **kwargs)
        return self.factor * y, state


def test_a_subclass_keeps_its_methods_also_frozen():
    made: Any = eqx.nn.make_with_state(Doubled)
    norm, state = reconfigure(*made(C, "batch", approach="batch"), approach="ema", eps=1e-3)
    assert (type(norm), norm.factor, norm.eps) == (Doubled, 2, 1e-3)
    y, _ = freeze(norm)(jnp.ones(C), state)
    np.testing.assert_allclose(y, 2, rtol=1e-3)
