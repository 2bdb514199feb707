"""The network of the variance clipping experiment: one normalisation layer, right behind."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from .lab.networks import NETWORKS as THEIRS
from .lab.networks import MakeNorm, Output, normalised

HIDDEN = 64


class Perceptron(eqx.Module):
    """Linear, norm, ReLU, linear: what happens to an image happens to the norm's input.

    No bias, no pooling and no other normalisation lies between the two, so a batch scaled by
    1e3 has 1e6 times the variance in every channel. And it trains in a millisecond a step.
    """

    linear1: eqx.nn.Linear
    norm: eqx.Module
    linear2: eqx.nn.Linear

    def __init__(self, make_norm: MakeNorm, key: PRNGKeyArray):
        keys = jax.random.split(key)
        self.linear1 = eqx.nn.Linear(28 * 28, HIDDEN, use_bias=False, key=keys[0])
        self.norm = make_norm(HIDDEN)
        self.linear2 = eqx.nn.Linear(HIDDEN, 10, key=keys[1])

    def __call__(self, x: Float[Array, "1 28 28"], state: eqx.nn.State) -> Output:
        # Black is 0 and stays 0. As -1, the pixels that are black in every image would have
        # gradients of rounding errors alone, which Adam scales up to whole steps.
        ink = (jnp.ravel(x) + 1) / 2
        normed, state = normalised(self.norm, self.linear1(ink), state)
        return jax.nn.log_softmax(self.linear2(jax.nn.relu(normed))), normed, state


NETWORKS = {"perceptron": Perceptron, **THEIRS}
