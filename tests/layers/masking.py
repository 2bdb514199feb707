"""Holds what tests of masks share: masks, layers, and the batch without padding."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from eqx_norm.strategies import Batch, Moments, Renorm, VarianceClip
from tests.compiling import filter_jit
from tests.helpers import at_step, copy, f32, floats, make, normal
from tests.layers.norms import with_parameters

N, C, L = 6, 3, 5
X, DY = normal(0, (N, C, L), 1, 2), normal(1, (N, C, L))
GARBAGE = (np.nan, np.inf, -np.inf, 1e30)
# In each of them 15 positions count, so that they share a compiled function.
EXAMPLES = np.array([False, True, True, False, True, False])
LENGTHS = np.arange(L) < np.array([0, 5, 2, 4, 1, 3])[:, None]
NOT_THE_FIRST = np.arange(N * L).reshape(N, L) % 2 > 0
MASKS = (np.tile(EXAMPLES[:, None], (1, L)), LENGTHS, NOT_THE_FIRST)

close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
# The rest of a statistic is no larger than a rounding of it, and any number up to that.
all_close = functools.partial(chex.assert_trees_all_close, rtol=1e-6, atol=1e-6)


def activation(u):
    """Returns what is neither 0 nor flat where u is 0, as it is at a masked position."""
    return jax.nn.softplus(u + 0.5)


def untrained(approach, activation=activation, axis_name="batch", **options):
    if approach == "variance_clip":
        approach = VarianceClip(Batch(0.7), ratio=1.5, start=1)  # so that it does clip
    elif approach == "renorm":
        approach = Renorm(0.7, r_max=1.5, d_max=0.5)  # so that it corrects
    else:
        options["momentum"] = 0.7
    layer, state = make(C, axis_name, approach=approach, activation=activation, **options)
    return with_parameters(layer, f32([0.5, 1, 2]), f32([0.3, -1, 0])), state


def trained(approach, activation=activation, **options):
    """Returns a layer after one batch, so that its memory matters."""
    layer, state = untrained(approach, activation, **options)
    batch = at_step(0, Moments.of(floats([1, 0, 2]), floats([1, 2, 3])))
    before = state.get(layer.memory_index)
    _, memory = layer.approach.update(batch, before.statistics)
    after = before._replace(statistics=memory, counts=jnp.array([1, 0], jnp.int32))
    return layer, state.set(layer.memory_index, after)


def masked(layer, *axis_names):
    """Returns `(x, mask, state) -> (y, state)` over a batch; the mask may be `None`."""

    def mapped(x, mask, state):
        return layer(x, state, mask=mask)

    for name in axis_names or ("batch",):
        mapped = jax.vmap(mapped, axis_name=name, in_axes=(0, 0, None), out_axes=(0, None))
    return mapped


def forward(layer, state, x, mask):
    return masked(layer)(x, mask, state)


call_masked = filter_jit(forward)


@filter_jit
def step(layer, state, x, mask, dy, axis_names=("batch",)):
    """Returns y, the state, and the gradients of sum(y * dy) in weight, bias and x."""

    def loss(weight, bias, x):
        model = masked(with_parameters(layer, weight, bias), *axis_names)
        y, after = model(x, mask, state)
        return jnp.vdot(y.astype(dy.dtype), dy).real, (y, after)

    gradient = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)
    gradients, (y, after) = gradient(layer.weight, layer.bias, x)
    return y, after, *gradients


def spoil(x, mask):
    """Returns `x` with NaN, infinities and 1e30 at the masked positions."""
    garbage = np.resize(np.asarray(GARBAGE, x.dtype), x.shape)
    garbage = garbage * (1 + 1j) if np.iscomplexobj(x) else garbage
    # Not by an operation of JAX, which `jax_debug_nans` would stop.
    return jax.device_put(np.where(positions(mask)[:, None], x, garbage).astype(x.dtype))


def positions(mask):
    return np.broadcast_to(mask.reshape(N, -1), (N, L))


def unpadded(x, mask):
    """Returns what counts and nothing else, as one batch without spatial axes."""
    return jnp.swapaxes(x, 1, 2)[positions(mask)]


def assert_as_unpadded(layer, state, x, mask, dy=DY, close: Any = close):
    y, after, dweight, dbias, dx = step(layer, copy(state), spoil(x, mask), mask, dy)
    expected = step(layer, copy(state), unpadded(x, mask), None, unpadded(dy, mask))
    close(unpadded(y, mask), expected[0])
    all_close(after, expected[1])
    close(dweight, expected[2], atol=1e-5)
    close(dbias, expected[3], atol=1e-5)
    close(unpadded(dx, mask), expected[4])
    for array in (y, dx):
        assert array.dtype == x.dtype
        assert not np.asarray(unpadded(array, ~mask)).view(np.uint8).any()
