"""Tests scale and shift of one call, `layer(x, weight=w, bias=b)`, and `weight_offset`.

tests/fuzz.py tests their values and gradients.
"""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import BatchNorm, GroupNorm, LayerNorm, RMSNorm
from eqx_norm._normalise import jaxprs
from tests import exact
from tests.exact import EPS, Batch
from tests.helpers import bits, copy, normal
from tests.layers.norms import NORMS, each_norm, made, mask_shape, with_parameters

N, SHAPE = 4, (6, 5, 7)
# Whether weight and bias of each example have a number for each value of x; otherwise they have
# the shape of the layer's own.
KINDS = {"own": (False, False), "values": (True, True), "mixed": (False, True)}
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def mapped(layer: Any, state: Any = None) -> Any:
    """Returns a function of x, weight, bias and mask of a batch that returns y."""

    def one(x, weight, bias, mask):
        options = {"weight": weight, "bias": bias, "mask": mask}
        if not isinstance(layer, BatchNorm):
            return layer(x, **options)
        return layer(x, copy(state), **options)[0]

    def call(x, weight=None, bias=None, mask=None, *, axis: int | None = 0):
        return jax.vmap(one, (0, axis, axis, 0), axis_name="batch")(x, weight, bias, mask)

    return call


def layer_of(name, **options):
    layer = NORMS[name].make(SHAPE, eps=EPS, **options)
    return layer if name == "BatchNorm" else (layer, None)


def drawn(name, kind, dtype=np.float32):
    """Returns x, dy, and a weight and bias for each example."""
    random = np.random.default_rng(0)
    x, dy = (random.standard_normal((N, *SHAPE)).astype(dtype) for _ in range(2))
    own = made(name, SHAPE)[0].weight.shape
    shapes = [SHAPE if per_value else own for per_value in kind]
    return x + dtype(10), dy, *(random.standard_normal((N, *s)).astype(dtype) for s in shapes)


def like_x(v):
    return v if v.shape == (N, *SHAPE) else v.reshape(N, -1, 1, 1)


@each_kind
@each_norm
def test_call_weights_in_half_precision_round_once(name, kind):
    """Fails for a separate scale and shift in bfloat16, which round three times."""
    arrays = [np.asarray(v, jnp.bfloat16) for v in drawn(name, kind)]
    x, _, weight, bias = arrays
    layer, state = layer_of(name, weight_offset=1.0)
    y = mapped(layer, state)(x, weight, bias)
    x, _, weight, bias = (np.asarray(v, np.float64) for v in arrays)
    plain = NORMS[name].exact(Batch(x, x, None, None)).answer.y
    expected = plain * (1 + like_x(weight)) + like_x(bias)
    assert y.dtype == jnp.bfloat16
    error = np.abs(np.asarray(y, np.longdouble) - expected)
    most = exact.half_ulp(expected, np.dtype(jnp.bfloat16)) + 1e-5 * np.abs(expected).max()
    assert (error <= most).all()


@each_norm
def test_call_weights_replace_the_layer_s_own(name):
    """Tests weight, bias and both; the layer's own have no gradient, and need not exist."""
    x, dy, weight, bias = drawn(name, KINDS["own"])
    layer, state = layer_of(name, activation=jax.nn.silu)
    own = layer.weight + 1, layer.bias + 2
    layer = with_parameters(layer, *own)
    bare = with_parameters(layer, None, None)
    for given in ((weight, None), (None, bias), (weight, bias)):
        filled = [
            jnp.broadcast_to(o, (N, *o.shape)) if v is None else v
            for v, o in zip(given, own, strict=True)
        ]
        y = mapped(layer, state)(x, *given)
        assert bits(y) == bits(mapped(bare, state)(x, *filled))
    gradient = eqx.filter_grad(lambda m: jnp.vdot(mapped(m, state)(x, weight, bias), dy))
    assert not any(np.any(v) for v in jax.tree.leaves(gradient(layer)))


@each_norm
def test_call_weights_trace_the_program_of_the_layer_s_own(name):
    """Compares with the program of a call that is given the layer's own weight and bias."""
    layer, state = layer_of(name)
    arrays, static = eqx.partition(layer, eqx.is_inexact_array)

    def program(*names):
        def loss(arrays, x):
            layer = eqx.combine(arrays, static)
            own = [getattr(layer, name) for name in names]
            return mapped(layer, state)(x, *own, axis=None).sum()

        return str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(arrays, normal(0, (N, *SHAPE))))

    assert program() == program("weight", "bias")


@each_norm
def test_residuals_and_passes_with_call_weights(name):
    """Tests that x is the only residual of its size, and that gradients of one weight for each
    example need no more passes than gradients of a shared weight."""
    layer, state = layer_of(name)
    x, dy, weight, bias = map(jnp.asarray, drawn(name, KINDS["own"]))

    def gradients(axis, *arrays):
        call = functools.partial(mapped(layer, state), axis=axis)
        _, pull_back = jax.vjp(call, *arrays)
        return pull_back(dy), jax.tree.leaves(pull_back)

    def passes(axis, *arrays):
        traced = jax.make_jaxpr(lambda *a: gradients(axis, *a)[0])(*arrays)
        names = [equation.primitive.name for equation in jaxprs.equations(traced.jaxpr)]
        return names.count("eqx_norm_sums"), names.count("eqx_norm_affine")

    kept = [leaf for leaf in gradients(0, x, weight, bias)[1] if leaf.size >= x.size]
    assert sum(leaf is x for leaf in kept) == 1
    assert len(kept) == 1 + 2 * (weight.size == x.size)  # and weights of all values
    assert passes(0, x, weight, bias) == passes(None, x, weight[0], bias[0])


@each_kind
@each_norm
@pytest.mark.parametrize(
    "dtype", [pytest.param(np.float32, marks=pytest.mark.long), jnp.bfloat16]
)
def test_call_weights_are_lowered_for_every_platform(name, kind, dtype):
    x, dy, weight, bias = drawn(name, kind, dtype)
    for mask in (None, np.ones(mask_shape(name, x.shape), bool)):

        def outputs(*arrays, mask=mask):
            y, pull_back = jax.vjp(lambda *a: mapped(*layer_of(name))(*a, mask), *arrays)
            return y, pull_back(dy)

        traced = jax.jit(outputs).trace(x, weight, bias)
        traced.lower(lowering_platforms=("cuda", "tpu"))


def test_call_weights_of_wrong_shape_or_dtype_are_errors():
    layer, x = LayerNorm(6), jnp.ones(6)
    group, image = GroupNorm(2, 6), jnp.ones(SHAPE)
    errors = [
        (
            lambda: layer(x, weight=jnp.ones(5)),
            ValueError,
            r"weight= has shape \(5,\).*\(6,\)\.",
        ),
        (lambda: layer(x, bias=jnp.ones((4, 6))), ValueError, r"jax.vmap\(lambda x, bias"),
        (lambda: group(image, weight=jnp.ones(5)), ValueError, r"or one for each value of x"),
        (
            lambda: layer(x, bias=jnp.ones(6, jnp.complex64)),
            TypeError,
            "bias=.*complex64",
        ),
        (lambda: LayerNorm(6, weight_offset=np.inf), ValueError, "^weight_offset=inf"),
    ]
    for call, kind, message in errors:
        with pytest.raises(kind, match=message):
            call()


# --- Weights around one, with `weight_offset`.


@each_norm
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_new_layer_with_weight_offset_multiplies_by_one(name, dtype):
    """Fails if the weight starts at 1, which would multiply by 2:
    https://github.com/huggingface/transformers/issues/40796."""
    make_layer = functools.partial(layer_of, name, dtype=dtype)
    layer, state = make_layer(weight_offset=1.0)
    assert not layer.weight.any()
    x = normal(0, (N, *SHAPE))
    plain, plain_state = make_layer()
    y, expected = (mapped(m, s)(x) for m, s in ((layer, state), (plain, plain_state)))
    assert bits(y) == bits(expected)


def test_weight_offset_is_added_in_float32():
    """Fails for a sum in bfloat16, in which 1 + 0.002 is 1:
    https://github.com/NVIDIA/TransformerEngine/pull/1690."""
    layer = RMSNorm(8, use_bias=False, dtype=jnp.bfloat16, weight_offset=1.0)
    weight = jnp.full(8, 0.002, jnp.bfloat16)
    x = normal(0, (8,))
    plain = RMSNorm(8, use_weight=False, use_bias=False)
    np.testing.assert_allclose(layer(x, weight=weight), plain(x) * 1.002, rtol=1e-5)
