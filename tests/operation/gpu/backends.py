"""Holds the kernel's backends to the bounds of the formulas, and lowers for named GPUs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from eqx_norm._normalise.gpu import choice, mosaic, triton
from tests.compiling import jit

HAS_MOSAIC = jax.__version_info__ >= (0, 12)
BACKENDS = {"triton": triton} | ({"mosaic": mosaic} if HAS_MOSAIC else {})
CORES = {"NVIDIA A100-SXM4-80GB": 108, "NVIDIA H200": 132, "NVIDIA B200": 148}
ULP, EPS = 2.0**-23, 1e-5  # of float32, and the layer's


def normal(shape, dtype="float32", mean=0.0):
    return jnp.asarray(np.random.RandomState(0).standard_normal(shape) + mean, dtype)


def statistics(backend, x, interpret=True):
    # How the work is cut up is no argument: a new function is traced anew.
    return jit(functools.partial(backend.statistics, interpret=interpret))(x)


def check_statistics(backend, x):
    """Holds the moments of (ensemble, rows, channels) to their bounds, in float64."""
    mean, m2, rest = (np.asarray(v, np.float64) for v in statistics(backend, x))
    x = np.asarray(x, np.float64)
    exact, variance = x.mean(1, keepdims=True), x.var(1, keepdims=True)
    # Of the 1e-6 by which y may be wrong, this is a fifth.
    assert np.all(np.abs(mean + rest - exact) <= 2e-7 * np.sqrt(variance + EPS))
    assert np.all(np.abs(mean - exact) <= 4 * ULP * (np.abs(exact) + np.sqrt(variance)))
    assert np.all(np.abs(m2 / x.shape[1] - variance) <= 5e-7 * (variance + EPS))


def mesh(kind="NVIDIA H200", size=1):
    """Tells jax what GPU is meant, which need not be there; before 0.11 it took any."""
    of = {}
    if jax.__version_info__ >= (0, 11):
        device = {"device_kind": kind, "num_cores": CORES[kind], "platform": "gpu"}
        of["abstract_device"] = jax.sharding.AbstractDevice(**device)
    automatic = (jax.sharding.AxisType.Auto,)
    return jax.sharding.AbstractMesh((size,), ("x",), automatic, **of)


def kernels(function, *arrays, on=None):
    """Returns how many kernels the function is lowered to, for a CUDA device."""
    with jax.sharding.use_abstract_mesh(on or mesh()), choice.quiet():
        traced = jax.jit(function).trace(*arrays)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    return text.count("__gpu$xla.gpu.triton") + text.count("mosaic_gpu_v2")
