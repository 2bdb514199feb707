"""Holds what tests of `fold` share: trained models, and both outputs compared."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from eqx_norm import BatchNorm
from eqx_norm.models import fold
from eqx_norm.models._layers import found
from eqx_norm.strategies import Running
from tests.compiling import filter_jit
from tests.helpers import floats, over_batch

KEY = jax.random.key(0)


def trained(model, state, seed=0):
    """Returns both with statistics, weights and biases of norms that are not 0 or 1."""
    random = np.random.RandomState(seed)
    for norm in found(model, BatchNorm).values():
        n = norm.input_size
        memory = Running.loaded(floats(random.randn(n)), floats(0.5 + random.rand(n)))
        state = state.set(norm.memory_index, memory)

    def new(array):
        return jnp.asarray(1 + 0.5 * random.randn(*array.shape), array.dtype)

    def affine(node):
        if not isinstance(node, BatchNorm) or node.weight is None:
            return node
        return eqx.tree_at(lambda n: (n.weight, n.bias), node, replace_fn=new)

    model = jax.tree.map(affine, model, is_leaf=lambda n: isinstance(n, BatchNorm))
    return eqx.nn.inference_mode(model), state


def sequence(*layers):
    """Returns a trained `Sequential`, in inference mode, and its state."""
    return trained(*eqx.nn.make_with_state(eqx.nn.Sequential)(list(layers)))


def norm(channels=4, **kwargs):
    return BatchNorm(channels, "batch", approach="batch", **kwargs)


def conv(**kwargs):
    return eqx.nn.Conv1d(3, 4, 3, key=KEY, **kwargs)


@filter_jit
def outputs(model, state, folded, left, x):
    return over_batch(model)(x, state)[0], over_batch(folded)(x, left)[0]


def check(model, state, x, pairs=None, rtol=1e-5):
    """Folds; both give the same, to 1e-5 of the largest output; the other state stays."""
    folded, left, report = fold(model, state, pairs)
    y, ours = outputs(model, state, folded, left, x)
    assert y.dtype == ours.dtype
    y, ours = np.asarray(y, np.float64), np.asarray(ours, np.float64)
    np.testing.assert_allclose(ours, y, rtol=0, atol=rtol * np.abs(y).max())
    return folded, left, report


class Net(eqx.Module):
    stem: eqx.nn.Sequential
    conv1: eqx.nn.Conv1d
    bn1: BatchNorm
    branches: list
    out: eqx.nn.Linear

    def __init__(self):
        self.stem = eqx.nn.Sequential(
            [
                norm(3),
                eqx.nn.Sequential([conv(), norm(), eqx.nn.Lambda(jax.nn.relu), norm()]),
                norm(),
                eqx.nn.Conv1d(4, 4, 1, key=KEY),
                eqx.nn.Lambda(jax.nn.relu),
            ]
        )
        self.conv1 = eqx.nn.Conv1d(4, 4, 1, key=KEY)
        self.bn1 = norm(activation=jax.nn.relu)
        self.branches = [eqx.nn.Conv1d(4, 4, 1, use_bias=False, key=KEY), norm()]
        self.out = eqx.nn.Linear(4, 2, key=KEY)

    def __call__(self, x, state):
        x, state = self.stem(x, state)
        y, state = self.bn1(self.conv1(x), state)
        z, state = self.branches[1](self.branches[0](x), state)
        return self.out((y + z).mean(1)), state
