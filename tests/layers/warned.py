"""Prints the warnings of a user's program, with file and line; test_errors.py runs it."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp

from eqx_norm import BatchNorm, InstanceNorm
from eqx_norm.strategies import Batch


class Model(eqx.Module):
    norm: BatchNorm

    def __init__(self):
        self.norm = BatchNorm(3, "b")  # the user's first line

    def __call__(self, x, state):
        return self.norm(x, state)  # the user's second line


with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        model, state = eqx.nn.make_with_state(Model)()
        over_batch = jax.vmap(model, axis_name="b", in_axes=(0, None), out_axes=(0, None))
        over_batch(jnp.ones((1, 3)), state)
        jax.vmap(InstanceNorm(8))(jnp.ones((2, 8, 1)))  # the user's third line
        assert model.norm.approach == Batch(0.99)
for warning in caught:
    print(warning.filename, warning.lineno, warning.message, sep="|")
