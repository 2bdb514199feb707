"""Holds what tests of `recalibrate` share: data, a network, and statistics in NumPy."""

import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from eqx_norm import BatchNorm
from eqx_norm.models import _recalibrate
from tests.compiling import filter_jit

SIZES = (16, 8, 16)  # a compilation for each


def data(*shape, mean=100.0, std=3.0, n=40):
    """Returns examples whose mean and spread differ along the batch and between channels."""
    random = np.random.RandomState(0)
    x = mean + std * random.standard_normal((n, *shape))
    drift = np.linspace(0, 5, n).reshape(-1, *(1 for _ in shape))
    channel = np.arange(1, shape[0] + 1).reshape(1, -1, *(1 for _ in shape[1:]))
    return np.asarray(channel * (x + drift), jnp.result_type(float))


def cut(x, sizes=SIZES):
    return np.split(x, np.cumsum(sizes)[:-1])


def of_all(x):
    """Returns count, mean and sum of squares of each channel, in float64."""
    x = np.moveaxis(np.asarray(x, np.float64), 1, 0).reshape(x.shape[1], -1)
    return x.shape[1], x.mean(1), np.square(x - x.mean(1, keepdims=True)).sum(1)


# Compiled without optimisation, for what is no test of accuracy.
STEP = filter_jit(inspect.unwrap(_recalibrate._step))


def network(key, *norms):
    """Returns two convolutions of one value each, with their norms."""
    keys = jax.random.split(key)
    first, second = norms or [BatchNorm(3, "batch", approach="batch") for _ in range(2)]
    convs = [eqx.nn.Conv1d(3, 3, 1, key=k) for k in keys]
    return eqx.nn.Sequential([convs[0], first, convs[1], second])


def convolved(conv, x):
    weight, bias = np.asarray(conv.weight, float)[..., 0], np.asarray(conv.bias, float)
    return np.einsum("oi,nix->nox", weight, x) + bias
