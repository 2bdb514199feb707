"""Tests that the norms of one example replace Equinox's, in values and gradients.

test_fuzz.py tests all norms by their formulas. The files named after accuracy, platforms,
export, dtypes and errors test all norms with BatchNorm.
"""

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import BatchNorm, GroupNorm, InstanceNorm, LayerNorm, RMSNorm
from tests.compiling import jit
from tests.helpers import bits, normal, over_batch, y_and_gradients
from tests.layers.norms import (
    NORMS,
    each_example_norm,
    moved,
    over_examples,
    with_parameters,
)

UNOPTIMISED = True  # compares values: tests/compiling.py

SHAPE = (6, 5, 7)


@jit
def train(layer, x, dy):
    """Returns y, and the gradients of weights and x."""
    return y_and_gradients(lambda layer, x: jax.vmap(layer)(x), dy, layer, x)


@pytest.mark.x32  # has its own dtypes
@pytest.mark.parametrize(
    ("kind", "arguments", "shape"),
    [
        (LayerNorm, (SHAPE, 1e-3), SHAPE),
        (LayerNorm, ([3, 4], 1e-3, True, False), (3, 4)),
        (LayerNorm, (6, 1e-3, False, True), (6,)),
        (LayerNorm, (6, 1e-3, True, True, jnp.complex64), (6,)),
        (GroupNorm, (2, 6, 1e-3), SHAPE),
        (GroupNorm, (3, None, 1e-3, False), SHAPE),
        (GroupNorm, (2, 6, 1e-3, True, jnp.bfloat16), (6,)),
        (InstanceNorm, (6, 1e-3, True), (6, 5)),
        (RMSNorm, (SHAPE, 1e-3), SHAPE),
        (RMSNorm, (6, 1e-3, True, False), (6,)),
        (RMSNorm, ((6,), 1e-3, False, False, jnp.bfloat16), (6,)),
    ],
)
def test_example_norms_equal_equinox(kind, arguments, shape):
    """Also checks that positional arguments, the type and the leaves are those of Equinox."""
    with jax.enable_x64(True):
        ours = moved(kind(*arguments))
        if kind is InstanceNorm:
            theirs = moved(eqx.nn.GroupNorm(arguments[0], *arguments))
        else:
            theirs = moved(getattr(eqx.nn, kind.__name__)(*arguments))
        assert isinstance(ours, type(theirs))
        fields = {name: v for name, v in vars(theirs).items() if not eqx.is_array(v)}
        assert fields.items() <= vars(ours).items()
        x, dx = np.random.default_rng(0).standard_normal((2, 5, *shape))
        if arguments[-1] == jnp.complex64:
            x, dx = x + 1j * dx, dx - 2j * x
        outputs, expected = (train(layer, 1 + 2 * x, dx) for layer in (ours, theirs))
    tolerance = {jnp.bfloat16: 2e-2, jnp.complex64: 1e-4}.get(arguments[-1], 1e-9)
    chex.assert_trees_all_close(
        *map(jax.tree.leaves, (outputs, expected)), rtol=tolerance, atol=tolerance
    )


def test_rms_norm_of_complex_numbers():
    """Compares with the formula: Equinox's layer divides by the root of a complex number."""
    x = jax.lax.complex(normal(0, (5, 6), 1.0), normal(1, (5, 6), -2.0, 3.0))
    scale = np.sqrt((np.abs(np.asarray(x)) ** 2).mean(1, keepdims=True) + 1e-5)
    y = jax.vmap(RMSNorm(6, dtype=jnp.complex64))(x)
    np.testing.assert_allclose(y, np.asarray(x) / scale, rtol=1e-5)


@pytest.mark.x32  # Equinox's layer promotes
def test_example_norms_take_and_return_the_state_of_a_batch_norm():
    layer = moved(LayerNorm(6))
    model, state = eqx.nn.make_with_state(
        lambda: eqx.nn.Sequential([layer, BatchNorm(6, "batch", approach="batch")])
    )()
    x = normal(0, (4, 6))
    assert jax.eval_shape(over_batch(model), x, state)[0].shape == x.shape
    y, after = layer(x[0], state)
    assert after is state
    assert bits(y) == bits(layer(x[0], key=jax.random.key(0)))


@each_example_norm
def test_norm_of_parts_of_an_example_equals_the_norm_of_the_whole(name):
    """Tests two parts along a mapped axis: halves of the rows of channels that share a weight,
    or of the first axis. tests/fuzz.py tests masks, and tests/devices a mesh."""
    axis = 2 if name in ("GroupNorm", "InstanceNorm") else 1  # of a batch
    x, dy = normal(0, (4, 6, 4, 7), 3, 2), normal(1, (4, 6, 4, 7))

    def weightless(shape, **options):
        return with_parameters(NORMS[name].make(shape, **options), None, None)

    @jit
    @jax.value_and_grad
    def of_whole(x):
        return jnp.vdot(over_examples(weightless(x.shape[1:]), x), dy)

    @jit
    @jax.value_and_grad
    def of_parts(x):
        halves = jnp.stack(jnp.split(x, 2, axis))
        part = weightless(halves.shape[2:], axis_name="part")
        y = jax.vmap(lambda x: over_examples(part, x), axis_name="part")(halves)
        return jnp.vdot(jnp.concatenate(y, axis), dy)

    chex.assert_trees_all_close(of_parts(x), of_whole(x), rtol=1e-5, atol=1e-5)
    of_parts.trace(x).lower(lowering_platforms=("cuda", "tpu"))


def test_group_norm_of_empty_arrays():
    for shape in ((0, 6, 2), (4, 6, 0)):
        x = jnp.ones(shape)
        y, gradient, dx = y_and_gradients(over_examples, x, GroupNorm(2, 6), x)
        assert y.shape == dx.shape == shape
        assert not np.any(gradient.weight)
