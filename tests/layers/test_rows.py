"""Tests that y and dx of a row depend on that row, weight, bias and dy's row alone, to the bit.

A row is an example of `LayerNorm` and `RMSNorm`, a group of `GroupNorm` and `InstanceNorm`.
tests/devices/over_uses.py has programs for several devices.
"""

import functools
import random
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax import export

from eqx_norm import GroupNorm, InstanceNorm, LayerNorm, RMSNorm
from tests import helpers
from tests.helpers import array, make, normal, same
from tests.layers.norms import EXAMPLE_NORMS, made, mask_shape, moved, over_examples
from tests.processes import python

N = 70
SILU = jax.nn.silu
LAYERS = [
    # Lengths: a power of two, of a model, prime, even and odd, of more values than one loop.
    (LayerNorm(384), (384,)),
    (LayerNorm(200, activation=jax.nn.gelu), (200,)),
    (LayerNorm(24, axis=0), (24, 6, 6)),
    (RMSNorm(128), (128,)),
    (RMSNorm(391, activation=SILU), (391,)),
    (RMSNorm(4100), (4100,)),
    (GroupNorm(8, 64), (64, 14, 14)),
    (GroupNorm(8, 32, activation=SILU), (32, 7, 7)),
    (InstanceNorm(24), (24, 9, 9)),
]
MORE = [
    *((kind(n), (n,)) for kind in (LayerNorm, RMSNorm) for n in (2, 768, 1009, 1024, 4096)),
    (LayerNorm((6, 50)), (6, 50)),
    (GroupNorm(8, 64), (64,)),
    (GroupNorm(2, 16), (16, 40, 40)),
    (InstanceNorm(64, affine=True), (64, 7, 7)),
    (RMSNorm(40000), (40000,)),
]
DTYPES = "float32", "bfloat16", "float16"
DRAWN = [(*case, DTYPES[i % 2]) for i, case in enumerate(LAYERS)]  # by `make test`
OTHERS = [
    pytest.param(*case, dtype, marks=pytest.mark.long)
    for i, case in enumerate(LAYERS + MORE)
    for dtype in DTYPES
    if i >= len(LAYERS) or dtype != DTYPES[i % 2]
]
each_case = pytest.mark.parametrize(("layer", "shape", "dtype"), DRAWN + OTHERS)
FEW = [*DRAWN[3:5], DRAWN[7], pytest.param(*DRAWN[2], marks=pytest.mark.long)]
few_cases = pytest.mark.parametrize(("layer", "shape", "dtype"), FEW)


def arrays(shape, dtype, n=N):
    x, dy = normal(0, (n, *shape), 1, 2), normal(1, (n, *shape))
    return array(x, dtype), array(dy, dtype)


@eqx.filter_jit
def y_alone(layer, x):
    return over_examples(layer, x)


@eqx.filter_jit
def y_and_gradients(layer, x, dy):
    """Returns y and the gradients of x, and of weight and bias."""
    return helpers.y_and_gradients(lambda x, layer: over_examples(layer, x), dy, x, layer)


@each_case
def test_a_row_does_not_depend_on_other_rows(layer, shape, dtype):
    """Tests other numbers of rows, other places, and y with and without a gradient."""
    layer, (x, dy) = moved(layer), arrays(shape, dtype)
    y, dx, _ = y_and_gradients(layer, x, dy)
    assert same(y_alone(layer, x), y)
    assert same(y_and_gradients(layer, x[::-1], dy[::-1])[:2], (y[::-1], dx[::-1]))
    for n in (1, 16):
        assert same(y_alone(layer, x[:n]), y[:n]), n
        assert same(y_and_gradients(layer, x[:n], dy[:n])[:2], (y[:n], dx[:n])), n


ACTIVATIONS = None, None, jax.nn.relu, SILU, jax.nn.gelu, jnp.tanh


@pytest.mark.filterwarnings("ignore:.*one value per group")
@pytest.mark.parametrize(
    "seed", [*range(8), *(pytest.param(i, marks=pytest.mark.long) for i in range(8, 32))]
)
def test_a_row_of_random_shape_does_not_depend_on_other_rows(seed):
    """Tests odd sizes and groups of several channels, each with an activation and a mask or
    not."""
    r = random.Random(seed)
    name, activation = r.choice(EXAMPLE_NORMS), r.choice(ACTIVATIONS)
    sizes = [r.choice([1, 2, 3, 5, 7, 8, 13, 16, 24]) for _ in range(r.choice([0, 0, 1, 2]))]
    shape = (3 * r.choice([1, 2, 3, 8, 11, 32, 65]), *sizes)  # norms.GROUPS groups
    layer, _ = made(name, shape, activation=activation)
    x, dy = arrays(shape, r.choice(DTYPES))
    mask = normal(2, mask_shape(name, x.shape)) < 1 if r.random() < 0.3 else None
    y, dx = y_and_dx_of_masked(layer, x, dy, mask)
    n = r.choice([1, 2, 3, 5, 31, 63])
    some = y_and_dx_of_masked(layer, *jax.tree.map(lambda a: a[:n], (x, dy, mask)))
    assert same(some, (y[:n], dx[:n]))


@eqx.filter_jit
def y_and_dx_of_masked(layer, x, dy, mask):
    return helpers.y_and_gradients(lambda x: over_examples(layer, x, mask), dy, x)


CPU = Path("/proc/cpuinfo")


@pytest.mark.long
@pytest.mark.skipif(
    not CPU.exists() or "avx512f" not in CPU.read_text(), reason="has no AVX-512 to turn off"
)
def test_rows_on_a_processor_without_avx_512():
    python("-m", "pytest", "-q", __file__, XLA_FLAGS="--xla_cpu_max_isa=AVX2")


@pytest.mark.parametrize(("layer", "shape"), [LAYERS[1], LAYERS[7]])
def test_a_row_with_its_own_mask_and_weights_does_not_depend_on_other_rows(layer, shape):
    x, dy = arrays(shape, "float32")
    mask = normal(2, (N, *(shape[1:] or shape))) < 1
    weights = {name: normal(i, (N, shape[0])) for i, name in enumerate(("weight", "bias"), 3)}

    @jax.jit
    def y_and_dx(x, dy, mask, weights):
        of_x = functools.partial(over_examples, layer, mask=mask, **weights)
        return helpers.y_and_gradients(of_x, dy, x)

    given = x, dy, mask, weights
    expected = y_and_dx(*given)
    for some in (slice(None, None, -1), slice(16)):
        rows = y_and_dx(*jax.tree.map(lambda a, some=some: a[some], given))
        assert same(rows, [a[some] for a in expected]), some


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        *((norm, (n,)) for n in (40, 384) for norm in (RMSNorm(n), LayerNorm(n))),
        pytest.param(RMSNorm(1280), (1280,), marks=pytest.mark.long),
        pytest.param(LayerNorm(1280), (1280,), marks=pytest.mark.long),
        (GroupNorm(8, 64), (64, 5, 5)),
    ],
)
def test_a_gradient_that_nearly_cancels_does_not_depend_on_other_rows(layer, shape, dtype):
    """Tests dy = x and no weights: dx is 0 but for rounding, so that half precision shows the
    last bits of a row's sums."""
    x, _ = arrays(shape, dtype)
    y, dx, _ = y_and_gradients(layer, x, x)
    for n in (1, 16):
        assert same(y_and_gradients(layer, x[:n], x[:n])[:2], (y[:n], dx[:n])), n


def cut(x):
    return x.reshape(7, -1, *x.shape[1:])


def nested(layer, x):
    return over_examples(functools.partial(over_examples, layer), cut(x))


def scanned(layer, x):
    return jax.lax.scan(lambda _, x: (None, over_examples(layer, x)), None, cut(x))[1]


def of_one(layer, x):
    return jax.lax.map(layer, x)


@eqx.filter_jit
def y_and_dx(way, layer, x, dy):
    return helpers.y_and_gradients(lambda x: way(layer, x).reshape(x.shape), dy, x)


WAYS = [over_examples, eqx.filter_checkpoint(over_examples), nested, scanned, of_one]


@few_cases
def test_a_row_does_not_depend_on_the_program(layer, shape, dtype):
    """Tests frozen weights, `checkpoint`, nested `vmap`, `scan`, and single examples."""
    layer, (x, dy) = moved(layer), arrays(shape, dtype)
    expected = y_and_gradients(layer, x, dy)[:2]
    for way in WAYS:
        assert same(y_and_dx(way, layer, x, dy), expected), way


@pytest.mark.usefixtures("unchecked")  # jaxtyping broadcasts no symbols
@few_cases
def test_a_row_does_not_depend_on_whether_the_batch_is_a_symbol(layer, shape, dtype):
    layer, (x, dy) = moved(layer), arrays(shape, dtype)
    y, dx, _ = y_and_gradients(layer, x, dy)
    (batch,) = export.symbolic_shape("b")
    like = jax.ShapeDtypeStruct((batch, *shape), dtype)
    exported = export.export(jax.jit(functools.partial(over_examples, layer)))(like)
    gradients = export.export(jax.jit(functools.partial(y_and_gradients, layer)))(like, like)
    for n in (1, N):
        assert same(jax.jit(exported.call)(x[:n]), y[:n])
        assert same(jax.jit(gradients.call)(x[:n], dy[:n])[:2], (y[:n], dx[:n]))


def test_an_example_in_inference_of_batch_norm_does_not_depend_on_other_examples():
    layer, state = make(24, "batch", approach="batch", inference=True)
    x = normal(0, (N, 24, 5, 5))
    mask = normal(1, (N, 5, 5)) < 1

    @jax.jit
    def y_and_dx(x, mask):
        def one(x, mask):
            return layer(x, state, mask=mask)[0]

        return helpers.y_and_gradients(lambda x: jax.vmap(one)(x, mask), x, x)

    for whole, part in ((None, None), (mask, mask[:3])):
        y, dx = y_and_dx(x, whole)
        assert same(y_and_dx(x[:3], part), (y[:3], dx[:3]))
