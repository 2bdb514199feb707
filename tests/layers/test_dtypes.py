"""Tests dtypes: of outputs, gradients and memory, in half precision and under x64."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import APPROACHES, cast, copy, normal, over_batch
from tests.layers.norms import made

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
            y, pull_back, state = eqx.filter_vjp(forward, layer, x, has_aux=True)
            ys = [y]
            if state is not None:
                ys += over_batch(eqx.nn.inference_mode(layer))(x, copy(state))[:1]
            return ys, pull_back(y), state

        outputs, (gradient, dx), state = eqx.filter_eval_shape(train_and_infer, layer, x)
    assert float_dtypes((outputs, dx)) == {jnp.dtype(dtype)}
    expected = default if weights is None else jnp.dtype(weights)
    assert float_dtypes(layer) == float_dtypes(gradient) == {expected}
    assert float_dtypes(state) <= {default}
