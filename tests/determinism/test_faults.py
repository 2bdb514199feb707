"""The probe finds each of the faults for which it is there, where it is."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import BatchNorm
from eqx_norm.determinism import Ledger, compare, monitor, monitor_module, recorded

STEPS = 40
GLOBAL = {"scale": 1.0}


def in_order(order, x):
    """Sums one term after the other."""
    return jax.lax.scan(lambda total, i: (total + x[i], None), jnp.zeros(()), order)[0]


def network(key):
    return eqx.nn.Sequential(
        [
            eqx.nn.Linear(4, 8, key=key),
            BatchNorm(8, "batch", approach="batch"),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.Dropout(0.5),
            eqx.nn.Lambda(lambda x: GLOBAL["scale"] * x),
            eqx.nn.Linear(8, 8, key=key),
            eqx.nn.Lambda(jax.tree_util.Partial(in_order, jnp.arange(8))),
        ]
    )


def train_step(model, state, x, y, key):
    weights, rest = eqx.partition(model, eqx.is_inexact_array)
    model, x = eqx.combine(monitor(weights, "weights"), rest), monitor(x, "x")

    def loss(model):
        prediction, new_state = jax.vmap(
            lambda x, key: monitor_module(model)(x, state=state, key=key),
            axis_name="batch",
            out_axes=(0, None),
        )(x, jax.random.split(key, len(x)))
        return monitor(jnp.mean((prediction - y) ** 2), "loss"), new_state

    gradient, state = eqx.filter_grad(loss, has_aux=True)(model)
    return eqx.apply_updates(model, jax.tree.map(lambda g: -0.01 * g, gradient)), state


def data(seed):
    """Returns the batches of a loader, which shuffles by a seed."""
    random = np.random.RandomState(0)
    x = random.standard_normal((4 * STEPS, 4)).astype(np.float32)
    y = np.sin(x.sum(axis=1))
    order = np.random.RandomState(seed).permutation(len(x)).reshape(STEPS, 4)
    return [(x[indices], y[indices]) for indices in order]


@pytest.fixture(scope="module")
def step():
    return eqx.filter_jit(recorded(train_step))


def run(path, step, fault=lambda i, *given: given, seed=0):
    model, state = eqx.nn.make_with_state(network)(jax.random.key(0))
    keys = jax.random.split(jax.random.key(1), STEPS)
    with Ledger(path) as ledger:
        for i, (x, y) in enumerate(data(seed)):
            model, x, y, key = fault(i, model, jnp.asarray(x), jnp.asarray(y), keys[i])
            (model, state), record = step(model, state, x, y, key)
            ledger.append(i, record)
    return path


@pytest.fixture(scope="module")
def reference(step, tmp_path_factory):
    return run(tmp_path_factory.mktemp("reference") / "a.jsonl", step)


def flipped(x, place, bit=0):
    bits = x.view(jnp.uint32)
    return bits.at[place].set(bits[place] ^ (1 << bit)).view(jnp.float32)


def a_flipped_bit(i, model, x, y, key):
    if i == 11:
        model = eqx.tree_at(lambda m: m[5].weight, model, flipped(model[5].weight, (3, 5)))
    return model, x, y, key


def another_order(i, model, x, y, key):
    return eqx.tree_at(lambda m: m[6].fn.args[0], model, jnp.arange(8)[::-1]), x, y, key


def no_seed(i, model, x, y, key):
    return model, x, y, jax.random.key(np.random.SeedSequence().entropy % 2**31)  # type: ignore


def another_label(i, model, x, y, key):
    return model, x, flipped(y, 0, bit=20) if i == 37 else y, key


def test_the_same_run_twice(reference, step, tmp_path):
    verdict = compare(reference, run(tmp_path / "b.jsonl", step))
    assert verdict.same, verdict


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ({"fault": a_flipped_bit}, "step 11: `weights.layers.5.weight` forward"),
        ({"fault": another_order}, "step 0: `layers.6` forward"),
        ({"seed": 1}, "step 0: `x` forward"),
        ({"fault": no_seed}, "step 0: `layers.3` forward"),
        ({"fault": another_label}, "step 37: `loss` forward"),
    ],
    ids=["a flipped bit", "a sum's order", "a shuffled loader", "unseeded dropout", "a label"],
)
def test_a_fault_is_found_where_it_is(reference, step, tmp_path, fault, found):
    verdict = compare(reference, run(tmp_path / "b.jsonl", step, **fault))
    assert str(verdict).startswith(found)
    assert f"step {verdict.step}: `{verdict.probe}` {verdict.kind}" == found


def test_a_layer_that_reads_global_state(reference, tmp_path, monkeypatch):
    monkeypatch.setitem(GLOBAL, "scale", 1 + 2**-20)
    other = run(tmp_path / "b.jsonl", eqx.filter_jit(recorded(train_step)))
    assert str(compare(reference, other)).startswith("step 0: `layers.4` forward")
