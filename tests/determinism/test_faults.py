"""The probe finds each of the faults for which it is there, where it is."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from eqx_norm import BatchNorm
from eqx_norm.determinism import Ledger, compare, monitor, monitor_module, recorded

STEPS = 40
GLOBAL = {"scale": 1.0}


class Pool(eqx.Module):
    """Sums in the given order, one term after the other."""

    order: Array

    def __call__(self, x):
        return jax.lax.scan(lambda total, i: (total + x[i], None), jnp.zeros(()), self.order)[0]


class Reader(eqx.Module):
    """Reads a global variable."""

    def __call__(self, x):
        return GLOBAL["scale"] * x


class Network(eqx.Module):
    first: eqx.nn.Linear
    norm: BatchNorm
    dropout: eqx.nn.Dropout
    reader: Reader
    second: eqx.nn.Linear
    pool: Pool

    def __init__(self, key):
        self.first = eqx.nn.Linear(4, 8, key=key)
        self.norm = BatchNorm(8, "batch", approach="batch")
        self.dropout = eqx.nn.Dropout(0.5)
        self.reader = Reader()
        self.second = eqx.nn.Linear(8, 8, key=key)
        self.pool = Pool(jnp.arange(8))

    def __call__(self, x, key, state):
        x, state = self.norm(self.first(x), state)
        x = self.reader(self.dropout(jax.nn.relu(x), key=key))
        return self.pool(self.second(x)), state


def train_step(model, state, x, y, key):
    weights, rest = eqx.partition(model, eqx.is_inexact_array)
    model, x = eqx.combine(monitor(weights, "weights"), rest), monitor(x, "x")

    def loss(model):
        forward = jax.vmap(
            monitor_module(model), axis_name="batch", in_axes=(0, 0, None), out_axes=(0, None)
        )
        prediction, new_state = forward(x, jax.random.split(key, len(x)), state)
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
    model, state = eqx.nn.make_with_state(Network)(jax.random.key(0))
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
    weight = flipped(model.second.weight, (3, 5)) if i == 11 else model.second.weight
    return eqx.tree_at(lambda m: m.second.weight, model, weight), x, y, key


def another_order(i, model, x, y, key):
    return eqx.tree_at(lambda m: m.pool.order, model, jnp.arange(8)[::-1]), x, y, key


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
        ({"fault": a_flipped_bit}, "step 11: `weights.second.weight` forward"),
        ({"fault": another_order}, "step 0: `pool` forward"),
        ({"seed": 1}, "step 0: `x` forward"),
        ({"fault": no_seed}, "step 0: `dropout` forward"),
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
    assert str(compare(reference, other)).startswith("step 0: `reader` forward")
