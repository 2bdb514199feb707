"""Tests dtypes: of outputs, gradients and memory, in half precision and under x64."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_norm
from eqx_norm import LayerNorm
from eqx_norm.strategies import Moments, Running
from tests.helpers import APPROACHES, cast, copy, normal, over_batch, y_and_gradients
from tests.layers.norms import NAMES, made

UNOPTIMISED = True  # compares values: tests/compiling.py

pytestmark = pytest.mark.x32  # has its own dtypes, in 64 bits and with strict promotion
F16, BF16, F32, F64 = jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64


def float_dtypes(tree):
    dtypes = {getattr(leaf, "dtype", jnp.dtype(bool)) for leaf in jax.tree.leaves(tree)}
    return {dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact)}


@pytest.mark.parametrize(
    ("name", "dtype", "weights", "x64", "masked"),
    [
        *((approach, BF16, F16, False, False) for approach in APPROACHES),
        *((approach, F64, None, True, True) for approach in APPROACHES),
        ("batch", F16, BF16, False, False),
        ("batch", F16, None, False, True),
        ("batch", F32, None, True, False),
        *((name, BF16, BF16, False, False) for name in ("LayerNorm", "RMSNorm", "GroupNorm")),
        *((name, F16, F32, False, False) for name in ("LayerNorm, axis=0", "InstanceNorm")),
    ],
)
def test_dtypes_of_outputs_gradients_and_memory(name, dtype, weights, x64, masked):
    """Checks that outputs have the dtype of x, gradients the dtype of the weights, which may be
    cast, and the memory the default dtype, without implicit promotion."""
    of_batch = {"approach": name} if name in APPROACHES else {}
    with jax.enable_x64(x64), jax.numpy_dtype_promotion("strict"):
        layer, call = made("BatchNorm" if of_batch else name, (6, 2), **of_batch)
        layer = layer if weights is None else cast(layer, weights)
        x = normal(0, (64, 6, 2), 100, 3).astype(dtype)
        mask = np.arange(64) < 40 if masked else None
        default = jnp.result_type(float)

        def train_and_infer(layer, x):
            forward = functools.partial(call, mask=mask)
            y, state, *gradients = y_and_gradients(forward, x, layer, x, has_aux=True)
            ys = [y]
            if state is not None:
                ys += over_batch(eqx.nn.inference_mode(layer))(x, copy(state))[:1]
            return ys, gradients, state

        outputs, (gradient, dx), state = eqx.filter_eval_shape(train_and_infer, layer, x)
    assert float_dtypes((outputs, dx)) == {jnp.dtype(dtype)}
    expected = default if weights is None else jnp.dtype(weights)
    assert float_dtypes(layer) == float_dtypes(gradient) == {expected}
    assert float_dtypes(state) <= {default}


def complex_activation(u):
    return u * (1 + 1j)


COMPLEX = {
    "weight": ({"weight": 1j}, None, r"^weight has dtype complex\w+, .* lose its imaginary"),
    "bias": ({"bias": 1j}, None, r"^bias has dtype complex"),
    "weight=": ({}, "weight", r"^weight has dtype complex"),
    "bias=": ({}, "bias", r"^bias has dtype complex"),
    "activation": ({"activation": complex_activation}, None, "result of activation=.*complex"),
}


@pytest.mark.parametrize("field", COMPLEX)
@pytest.mark.parametrize("name", NAMES)
def test_complex_numbers_for_real_x_are_an_error_that_names_the_field(name, field):
    """Includes both modes of a batch norm, and half precision."""
    changed, given, words = COMPLEX[field]
    layer, call = made(name, (6, 2), activation=changed.get("activation"))
    for part in ("weight", "bias"):
        if part in changed:
            array = getattr(layer, part) + changed[part]
            layer = eqx.tree_at(lambda layer, part=part: getattr(layer, part), layer, array)
    shape = (6,) if "axis=0" in name or name not in ("LayerNorm", "RMSNorm") else (6, 2)
    kwargs = {} if given is None else {given: jnp.ones((4, *shape), jnp.complex64)}
    layers = [layer, eqx.nn.inference_mode(layer)] if name == "BatchNorm" else [layer]
    for layer in layers:
        for x in (normal(0, (4, 6, 2)), normal(0, (4, 6, 2)).astype(BF16)):
            with pytest.raises(TypeError, match=words):
                call(layer, x, **kwargs)


@pytest.mark.parametrize(
    ("used", "weights", "words"),
    [
        ((0.0, 1.0), (1j,), "^weight has dtype complex"),
        ((0.0, 1.0), (None, 1j), "^bias has dtype complex"),
        ((1j, 1.0), (), "^mean has dtype complex"),
    ],
)
def test_normalise_takes_complex_numbers_for_complex_x_only(used, weights, words):
    x = normal(0, (4,))
    with pytest.raises(TypeError, match=words):
        eqx_norm.normalise(x, Moments.of(*used), *weights)
    assert jnp.iscomplexobj(eqx_norm.normalise(x + 0j, Moments.of(*used), *weights))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Moments.of(np.zeros(2), np.ones(2) * 1j), "^variance has dtype complex"),
        (lambda: Moments.of(np.zeros(2), 1.0, np.complex64(3)), "^count has dtype complex"),
        (lambda: Moments.of(np.zeros(2) * 1j, 1.0).astype(F32), "^mean has dtype complex"),
        (lambda: Running.loaded(np.zeros(2), np.ones(2) * 1j), "^variance has dtype complex"),
    ],
)
def test_moments_refuse_complex_numbers_for_real_ones(call, words):
    with pytest.raises(TypeError, match=words):
        call()


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, bool])
def test_quantised_weights_are_floats_of_the_same_values(dtype):
    layer = LayerNorm(6, weight_offset=1.0)
    weight = jnp.arange(6) % 2 == 0
    values = (
        eqx.tree_at(lambda layer: layer.weight, layer, weight.astype(d))(normal(0, (6,)))
        for d in (dtype, F32)
    )
    np.testing.assert_array_equal(*values)
