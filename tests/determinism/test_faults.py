"""Tests that `compare` finds each kind of fault, in the right place."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import BatchNorm
from eqx_norm.determinism import Ledger, compare, monitor, monitor_module, recorded
from tests.helpers import normal

STEPS = 5
X, Y = normal(0, (STEPS, 4, 4)), normal(1, (STEPS, 4))


def in_order(order, x):
    """Sums one term after the other."""
    return jax.lax.scan(lambda total, i: (total + x[i], None), jnp.zeros(()), order)[0]


def network(key):
    return eqx.nn.Sequential(
        [
            eqx.nn.Linear(4, 8, key=key),
            BatchNorm(8, "batch", approach="batch"),
            eqx.nn.Dropout(0.5),
            eqx.nn.Linear(8, 8, key=key),
            eqx.nn.Lambda(jax.tree_util.Partial(in_order, jnp.arange(8))),
        ]
    )


@eqx.filter_jit
@recorded
def step(model, state, x, y, key):
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


def put_in(fault, i, model, x, y, key):
    """Returns the arguments of step i with a fault in one of them."""
    match fault:
        case "a flipped bit" if i == 3:
            bits = model[3].weight.view(jnp.uint32)
            weight = bits.at[3, 5].set(bits[3, 5] ^ 1).view(jnp.float32)
            model = eqx.tree_at(lambda m: m[3].weight, model, weight)
        case "another order":
            model = eqx.tree_at(lambda m: m[4].fn.args[0], model, jnp.arange(8)[::-1])
        case "a shuffled loader":
            x, y = X[-1 - i], Y[-1 - i]
        case "no seed":
            key = jax.random.key(np.random.SeedSequence().generate_state(1)[0])
        case "another label" if i == 4:
            y = y.at[0].add(1)
    return model, x, y, key


def run(path, fault=None):
    model, state = eqx.nn.make_with_state(network)(jax.random.key(0))
    keys = jax.random.split(jax.random.key(1), STEPS)
    with Ledger(path) as ledger:
        for i in range(STEPS):
            model, *batch = put_in(fault, i, model, X[i], Y[i], keys[i])
            (model, state), record = step(model, state, *batch)
            ledger.append(i, record)
    return path


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return run(tmp_path_factory.mktemp("reference") / "a.jsonl")


@pytest.mark.parametrize(
    ("fault", "verdict"),
    [
        (None, "the same: "),
        ("a flipped bit", "step 3: `weights.layers.3.weight` forward"),
        ("another order", "step 0: `layers.4` forward"),
        ("a shuffled loader", "step 0: `x` forward"),
        ("no seed", "step 0: `layers.2` forward"),
        ("another label", "step 4: `loss` forward"),
    ],
)
def test_a_fault_is_found_where_it_is(reference, tmp_path, fault, verdict):
    assert str(compare(reference, run(tmp_path / "b.jsonl", fault))).startswith(verdict)
