"""Lists the backends of the operation's passes, and holds them to their bounds."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eqx_norm._normalise import on_cpu, reference
from eqx_norm._normalise.gpu import choice
from eqx_norm._normalise.gpu.mosaic import Mosaic
from eqx_norm._normalise.gpu.triton import Triton
from tests.compiling import jit

from .gpus import HAS_MOSAIC, mesh

ULP = 2.0**-23  # of float32
EPS = 1e-5  # the layer's
# The same work cut up in other ways, so that few values get to all parts of a kernel: one
# program does all of it, chunk after chunk; or each has one chunk, and there is much to merge.
CUTS = {
    "as it is": {},
    "loops": {"_PROGRAMS": 1, "_MOST_HELD": 128, "_HELD": 8},
    "slices": {"_PROGRAMS": 2**20, "_MOST_HELD": 128, "_HELD": 8, "_SLICE": 1},
}
_NAMES = """
relu relu6 leaky_relu elu celu selu gelu silu mish softplus squareplus sparse_plus soft_sign
hard_tanh sigmoid log_sigmoid hard_sigmoid hard_silu
"""
# Of each kind that a kernel may be asked to differentiate, and some that are made of more.
ACTIVATIONS = {
    **{name: getattr(jax.nn, name) for name in _NAMES.split()},
    "tanh": jnp.tanh,
    "a polynomial": lambda u: u**3 - 2 * jnp.square(u) + jnp.abs(u) ** 1.5,
    "waves": lambda u: jnp.sin(u) + jnp.cos(2 * u) + jnp.exp2(u),
    "a selection": lambda u: jnp.where((u > 0) & (u != 1) | (u <= -1), u, -0.1 * u),
    "clipped": lambda u: jnp.clip(u, -1, 1) * jax.lax.stop_gradient(jnp.sign(u)),
    "logarithms": lambda u: jnp.log(u) + jnp.log1p(u) + jnp.expm1(u) + jax.lax.rsqrt(u),
    "checkpointed": jax.checkpoint(lambda u: jax.nn.silu(u)),
}


class Xla:
    """Computes the passes by the formulas, as a backend does by kernels."""

    def serves(self, x, mask=None, activation=None):
        del x, mask, activation

    def statistics(self, x, mask=None):
        return on_cpu.statistics(x, mask)

    def vjp_sums(self, activation, g, a, b, x, mean, rest, mask=None):
        g, total = g.astype(mean.dtype), on_cpu.total
        g = reference.activation_jvp(g, a, b, x, mean, rest, mask, activation=activation)
        return reference.sums(g, x, mean, rest, mask, shape=mean.shape, total=total)


BACKENDS: dict[str, Any] = {"xla": Xla(), "triton": Triton(interpret=True)}
if HAS_MOSAIC:
    BACKENDS["mosaic"] = Mosaic(interpret=True)


def operands(shape, dtype, *, masked=False):
    """Returns the shapes of x, of a vector, and of a mask or none."""
    vector = jax.ShapeDtypeStruct((*shape[:-3], 1, shape[-2], 1), "float32")
    mask = jax.ShapeDtypeStruct((*shape[:-2], 1, shape[-1]), "bool")
    return jax.ShapeDtypeStruct(shape, dtype), vector, [mask] * masked


def normal(shape, dtype="float32", mean=0.0, seed=0):
    values = np.random.RandomState(seed).standard_normal(shape)
    return jnp.asarray(values + mean, dtype)


def some(shape):
    """Returns a mask in which the first value does not count."""
    mask = np.random.RandomState(1).random((*shape[:-2], 1, shape[-1])) < 0.6
    mask[..., 0, :, 0] = False
    return jnp.asarray(mask)


def statistics(backend, x, mask=None):
    # How the work is cut up is no argument: a new function is traced anew.
    return jit(functools.partial(backend.statistics))(x, mask)


def check_statistics(backend, x, mask=None):
    """Holds the moments to the bounds of the formulas, in float64."""
    count, mean, m2, rest = (np.asarray(v, np.float64) for v in statistics(backend, x, mask))
    x = np.asarray(x, np.float64)
    mask = np.broadcast_to(True if mask is None else np.asarray(mask), x.shape)
    axes = (-3, -1)
    n = mask.sum(axes)
    safe = np.maximum(n, 1)
    exact = np.where(mask, x, 0).sum(axes) / safe
    deviations = np.where(mask, x - exact[..., None, :, None], 0)
    variance = (deviations**2).sum(axes) / safe
    np.testing.assert_array_equal(count, n)
    # Of the 1e-6 by which y may be wrong, this is a fifth.
    assert np.all(np.abs(mean + rest - exact) <= 2e-7 * np.sqrt(variance + EPS))
    assert np.all(np.abs(mean - exact) <= 4 * ULP * (np.abs(exact) + np.sqrt(variance)))
    assert np.all(np.abs(m2 / safe - variance) <= 5e-7 * (variance + EPS))


@functools.partial(jit, static_argnums=0)
def _summands(activation, g, a, b, x, mean, rest, mask):
    """Returns g through the activation, the deviations, and g as it is given."""
    g, d = g.astype(jnp.float32), reference.centred(x, mean, rest)
    weighted = reference.activation_jvp(g, a, b, x, mean, rest, activation=activation)
    return [reference.counted(values, mask) for values in (weighted, d, g)]


def check_sums(backend, activation, shape, masked=False, dtype="float32", g_dtype="float32"):
    """Holds the sums of an activation's jvp to the bounds of weight and bias, in float64."""
    mean, a, b = (normal((*shape[:-3], 1, shape[-2], 1), seed=i) for i in (2, 3, 4))
    rest = 1e-8 * a
    x, g = normal(shape, dtype), normal(shape, g_dtype, seed=5)
    mask = some(shape) if masked else None
    # No derivative is calculated where nothing counts.
    x = x if mask is None else jnp.where(mask, x, jnp.nan)
    arrays = g, a, b, x, mean, rest, mask
    sums = jit(functools.partial(backend.vjp_sums, activation))(*arrays)
    summands = _summands(activation, *arrays)
    weighted, d, given = (np.asarray(values, np.float64) for values in summands)
    for got, factor in zip(sums, (1, d), strict=True):
        terms = weighted * factor
        assert got.shape == mean.shape
        assert got.dtype == jnp.float32
        error = np.abs(np.asarray(got, np.float64) - terms.sum((-3, -1), keepdims=True))
        most = 2e-7 * np.abs(terms).sum((-3, -1), keepdims=True)
        if activation is not None:
            # A derivative is about 1, wrong by ulps of 1.
            most += 4 * ULP * np.abs(given * factor).sum((-3, -1), keepdims=True)
        assert np.all(error <= most)


# --- Lowered for GPUs that are not there.


def lowered(function, *arrays, on=None):
    """Returns how many kernels the function is lowered to."""
    with jax.sharding.use_abstract_mesh(on or mesh()), choice.quiet():
        traced = jax.jit(function).trace(*arrays)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    return text.count("__gpu$xla.gpu.triton") + text.count("mosaic_gpu_v2")


def lowered_sums(backend, activation, x, vector, mask=(), **keywords):
    function = functools.partial(backend.vjp_sums, activation)
    return lowered(function, x, vector, vector, x, vector, vector, *mask, **keywords)
