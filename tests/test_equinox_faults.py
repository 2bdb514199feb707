"""What the README says that the swap puts right: Equinox's layer has it, this one does not.

A test here fails when Equinox mends its layer; then the README's table loses a row.
"""

from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import BatchNorm

from .helpers import call, normal, over_batch

X = normal(0, (64, 3), 2, 1)


def pair(mode: Literal["batch", "ema"] = "batch", **kwargs):
    theirs = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode=mode, **kwargs)
    ours = eqx.nn.make_with_state(BatchNorm)(3, "batch", approach=mode, **kwargs)
    return theirs, ours


def test_the_default():
    with pytest.warns(UserWarning, match="defaults to 'ema'"):
        assert eqx.nn.BatchNorm(3, "batch").mode == "ema"


def test_inference_variance_after_one_step():
    stds = []
    for layer, state in pair():
        _, state = call(layer, state, X)
        stds.append(float(call(eqx.nn.inference_mode(layer), state, X)[0].std()))
    theirs, ours = stds
    np.testing.assert_allclose(theirs, 0.1, rtol=0.1)  # variance 100 instead of 1
    np.testing.assert_allclose(ours, 1, rtol=0.1)


def test_constant_channel():
    theirs, ours = (abs(call(*p, jnp.full((7, 3), 0.1))[0]).max() for p in pair())
    assert theirs > 1e-7
    assert ours == 0


def test_nan_in_one_batch():
    finite = []
    for layer, state in pair():
        for x in (X, X.at[0, 0].set(jnp.nan), X):
            _, state = call(layer, state, x)
        y, _ = call(eqx.nn.inference_mode(layer), state, X)
        finite.append(bool(np.isfinite(y).all()))
    assert finite == [False, True]


def test_half_precision():
    theirs, ours = pair("ema")
    with pytest.raises(TypeError, match="select"):
        call(*theirs, X.astype(jnp.bfloat16))
    assert call(*ours, X.astype(jnp.bfloat16))[0].dtype == jnp.bfloat16
    dtypes = [call(*p, X.astype(jnp.bfloat16))[0].dtype for p in pair()]
    assert dtypes == [jnp.float32, jnp.bfloat16]
    theirs, ours = pair(dtype=jnp.bfloat16)
    states = [call(*p, X.astype(jnp.bfloat16))[1] for p in (theirs, ours)]
    dtypes = [{a.dtype for a in jax.tree.leaves(s) if eqx.is_inexact_array(a)} for s in states]
    assert dtypes == [{jnp.dtype(jnp.bfloat16)}, {jnp.dtype(jnp.float32)}]


def test_plain_jit():
    theirs, ours = pair()
    run = jax.jit(lambda layer, state, x: over_batch(layer)(x, state)[0])
    with pytest.raises(TypeError, match="non-array argument|not a valid JAX type"):
        run(*theirs, X)
    assert run(*ours, X).shape == X.shape
