"""Tests GroupNorm, InstanceNorm and RMSNorm: as Equinox's, and as exact as the other layers.

`right` is each of them in extended precision. Errors of layers: test_errors.py.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import BatchNorm, GroupNorm, InstanceNorm, LayerNorm, RMSNorm
from tests.compiling import filter_jit
from tests.helpers import bits, f32, normal, over_batch
from tests.layers.accuracy import BOUNDS

EPS = 1e-5
SHAPE = (4, 6, 5, 7)
# A layer for examples of SHAPE[1:], and how many groups it makes of their values.
NORMS: dict[str, tuple[Any, int]] = {
    "group": (lambda **how: GroupNorm(2, 6, **how), 2),
    "one group": (lambda **how: GroupNorm(1, 6, **how), 1),
    "instance": (lambda **how: InstanceNorm(6, affine=True, **how), 6),
    "layer": (lambda **how: LayerNorm(SHAPE[1:], **how), 1),
    "rms": (lambda **how: RMSNorm(SHAPE[1:], **how), 1),
}
each_norm = pytest.mark.parametrize("name", NORMS)


def moved(layer):
    """Returns the layer with another weight and bias."""
    random = np.random.RandomState(3)

    def move(leaf):
        return leaf + jnp.asarray(random.uniform(-0.5, 0.5, leaf.shape), leaf.dtype)

    return jax.tree.map(move, layer)


@filter_jit
def differentiate(layer, x, dy, mask=None):
    """Returns y, and the gradients of sum(y * dy) in (layer, x)."""

    def f(layer_and_x):
        layer, x = layer_and_x
        if mask is None:
            y = jax.vmap(layer)(x)
        else:
            y = jax.vmap(lambda x, mask: layer(x, mask=mask))(x, mask)
        return (y * dy).astype(float).sum(), y

    gradients, y = eqx.filter_grad(f, has_aux=True)((layer, x))
    return y, gradients


# --- As Equinox's.


@pytest.mark.x32  # Equinox's layers promote
@pytest.mark.parametrize(
    ("ours", "theirs", "arguments", "shape"),
    [
        (GroupNorm, eqx.nn.GroupNorm, (2, 6, 1e-3), SHAPE[1:]),
        (GroupNorm, eqx.nn.GroupNorm, (3, None, 1e-3, False), SHAPE[1:]),
        (GroupNorm, eqx.nn.GroupNorm, (2, 6, 1e-3, True, jnp.bfloat16), (6,)),
        (InstanceNorm, lambda c, *how: eqx.nn.GroupNorm(c, c, *how), (6, 1e-3, True), (6, 5)),
        (RMSNorm, eqx.nn.RMSNorm, (SHAPE[1:], 1e-3), SHAPE[1:]),
        (RMSNorm, eqx.nn.RMSNorm, (6, 1e-3, True, False), (6,)),
        (RMSNorm, eqx.nn.RMSNorm, ((6,), 1e-3, False, False, jnp.bfloat16), (6,)),
    ],
)
@pytest.mark.parametrize("activation", [None, jax.nn.silu])
def test_as_equinox(ours, theirs, arguments, shape, activation):
    """By position, the arguments are Equinox's, and so is the type."""
    ours, theirs = moved(ours(*arguments, activation=activation)), moved(theirs(*arguments))
    assert isinstance(ours, type(theirs))
    fields = {name: value for name, value in vars(theirs).items() if not eqx.is_array(value)}
    assert fields.items() <= vars(ours).items()
    x, dy = normal(0, (5, *shape), 1.0, 2.0), normal(1, (5, *shape))

    def activated(x):
        return theirs(x) if activation is None else activation(theirs(x))

    def second(layer):
        gradient = jax.grad(lambda x: jnp.vdot(jnp.sin(jax.vmap(layer)(x)), dy))
        return jax.jit(lambda: jax.jvp(gradient, (x,), (dy,))[1])()

    y, (gradients, dx) = differentiate(ours, x, dy)
    np.testing.assert_allclose(y, jax.vmap(activated)(x), rtol=1e-5, atol=1e-5)
    f = eqx.filter_jit(eqx.filter_grad(lambda both: jnp.vdot(jax.vmap(both[0])(both[1]), dy)))
    if activation is None:
        right, right_dx = f((theirs, x))
        np.testing.assert_allclose(dx, right_dx, rtol=1e-4, atol=1e-5)
        for a, b in zip(*map(jax.tree.leaves, (gradients, right)), strict=True):
            np.testing.assert_allclose(
                f32(a), f32(b), rtol=1e-2 if a.dtype != x.dtype else 1e-4, atol=1e-4
            )
    np.testing.assert_allclose(second(ours), second(activated), rtol=1e-3, atol=1e-4)


@each_norm
@pytest.mark.x32
def test_where_a_batch_norm_stood_and_in_a_file_of_equinox_s(name, tmp_path):
    layer = moved(NORMS[name][0]())
    model, state = eqx.nn.make_with_state(
        lambda: eqx.nn.Sequential([layer, BatchNorm(6, "batch", approach="batch")])
    )()
    assert jax.jit(over_batch(model))(normal(0, SHAPE), state)[0].shape == SHAPE
    y, after = layer(normal(0, SHAPE[1:]), state)
    assert after is state
    assert bits(y) == bits(layer(normal(0, SHAPE[1:]), key=jax.random.key(0)))
    (theirs,) = (base for base in type(layer).mro() if base.__module__.startswith("equinox.nn"))
    eqx.tree_serialise_leaves(tmp_path / "layer", layer)
    sizes = (layer.groups, layer.channels) if hasattr(layer, "groups") else (layer.shape,)
    again = eqx.tree_deserialise_leaves(tmp_path / "layer", theirs(*sizes))
    assert (bits(again.weight), bits(again.bias)) == (bits(layer.weight), bits(layer.bias))


# --- As exact as can be.


def right(name, layer, x, dy, mask):
    """Returns y, dx, dweight, dbias, and the units of their errors, in extended precision."""
    groups, n = NORMS[name][1], len(x)
    x, dy = (np.asarray(a, np.longdouble) for a in (x, dy))
    rows = n, groups, -1
    counts = np.broadcast_to(mask[:, None], x.shape).reshape(rows)
    weight, bias = (np.asarray(v, np.longdouble) for v in (layer.weight, layer.bias))
    if weight.ndim == 1:
        weight, bias = (v[:, None, None] for v in (weight, bias))
    x = np.where(counts, x.reshape(rows), 0)
    g = np.where(counts, (dy * weight).reshape(rows), 0)
    count = np.maximum(counts.sum(-1, keepdims=True), 1)

    def mean(values):
        return np.where(counts, values, 0).sum(-1, keepdims=True) / count

    d = x - (0 if name == "rms" else mean(x))
    rstd = 1 / np.sqrt(mean(d * d) + np.longdouble(EPS))
    xhat = np.where(counts, d * rstd, 0)
    dx = rstd * (g - (0 if name == "rms" else mean(g)) - xhat * mean(g * xhat))
    dx = np.where(counts, dx, 0).reshape(SHAPE)
    xhat, counts = xhat.reshape(SHAPE), counts.reshape(SHAPE)
    summed = (0, 2, 3) if layer.weight.ndim == 1 else 0
    dy = np.where(counts, dy, 0)
    y = np.where(counts, xhat * weight + bias, 0)
    largest = np.broadcast_to(np.abs(g).max(-1, keepdims=True) * rstd, g.shape).reshape(SHAPE)
    sums = np.abs(dy).sum(summed)
    # Each rstd may be off by a few roundings, and so is what it contributes.
    of_rstd = np.abs(dy * xhat).sum(summed)
    answers = y, dx, (dy * xhat).sum(summed), dy.sum(summed)
    units = np.maximum(1, np.abs(xhat)), largest, sums + 4.3 * of_rstd, sums
    return answers, [np.where(unit == 0, 1, unit) for unit in units]


ALL = np.ones((4, 5, 7), bool)
SOME = np.arange(4 * 35).reshape(4, 5, 7) % np.array([1, 2, 3, 5])[:, None, None] == 0
NONE_OF_THE_SECOND = SOME & (np.arange(4) != 1)[:, None, None]
MASKS = {"all": ALL, "some": SOME, "none of one": NONE_OF_THE_SECOND}


@each_norm
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("ratio", [0, 1e5])
@pytest.mark.x32
def test_within_the_bounds(name, mask, ratio):
    """Masked values may be anything; their outputs and gradients are 0."""
    layer = moved(NORMS[name][0]())
    random = np.random.RandomState(0)
    std = 10 ** random.uniform(-1, 1, (SHAPE[0], 1, 1, 1))
    x = f32(std * (ratio * random.choice([-1, 1], std.shape) + random.standard_normal(SHAPE)))
    if ratio == 0:
        x = x.at[0, 0, 0, 0].set(1e6)
    dy = f32(random.standard_normal(SHAPE))
    answers, units = right(name, layer, x, dy, mask)
    given = jnp.where(mask[:, None], x, jnp.nan)
    y, (gradient, dx) = differentiate(layer, given, dy, None if mask.all() else mask)
    found = map(np.asarray, (y, dx, gradient.weight, gradient.bias))
    names = "y", "dx", "dweight", "dbias"
    for of, ours, exact, unit in zip(names, found, answers, units, strict=True):
        assert np.max(np.abs(ours - exact) / unit) <= BOUNDS[of], of
    for values in (y, dx):
        assert not np.asarray(values)[np.broadcast_to(~mask[:, None], SHAPE)].any()


@each_norm
@pytest.mark.parametrize("activation", [None, jax.nn.silu, jax.nn.softmax])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_gradients_of_masked_values_are_0_whatever_the_others_hold(name, activation, value):
    layer = moved(NORMS[name][0](activation=activation))
    x, mask = normal(0, SHAPE).at[:, 0, 0, 0].set(value), SOME
    y, (gradient, dx) = differentiate(layer, x, normal(1, SHAPE), mask)
    assert np.isnan(gradient.weight).any()
    for values in (y, dx):
        np.testing.assert_array_equal(np.where(mask[:, None], 0, values), 0)


@each_norm
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize(("mean", "std"), [(300, 1), (0, 300)])
@pytest.mark.x32
def test_half_precision_is_calculated_in_float32(name, dtype, mean, std):
    """In float16, squares of 300 overflow."""
    layer = moved(NORMS[name][0]())
    x, dy = normal(0, SHAPE, mean, std).astype(dtype), normal(1, SHAPE).astype(dtype)
    (right_y, right_dx, *_), (unit, unit_dx, *_) = right(name, layer, x, dy, ALL)
    y, (_, dx) = differentiate(layer, x, dy)
    assert y.dtype == dx.dtype == dtype
    for ours, exact, one in ((y, right_y, unit), (dx, right_dx, unit_dx)):
        ulp = np.abs(exact) * float(jnp.finfo(dtype).eps) + float(jnp.finfo(dtype).tiny)
        assert np.max((np.abs(np.asarray(ours, float) - exact) - ulp / 2) / one) <= 1e-6


@pytest.mark.parametrize("value", [121.7, 65504.0])
@pytest.mark.parametrize("name", [name for name in NORMS if name != "rms"])
def test_a_constant_gives_the_bias(name, value):
    """https://github.com/BVLC/caffe/issues/3963"""
    layer = moved(NORMS[name][0]())
    x = jnp.full(SHAPE, value, jnp.float32)
    y, (_, dx) = differentiate(layer, x, jnp.ones(SHAPE, jnp.float32))
    bias = layer.bias if layer.bias.ndim > 1 else layer.bias[:, None, None]
    np.testing.assert_array_equal(y, jnp.broadcast_to(bias, SHAPE).astype(y.dtype))
    assert np.isfinite(dx).all()


# LayerNorm and RMSNorm are made for one shape, which is not empty.
EMPTY = [
    *((name, (0, *SHAPE[1:])) for name in NORMS),
    *((name, (*SHAPE[:3], 0)) for name in NORMS if name not in ("layer", "rms")),
]


@pytest.mark.parametrize(("name", "size"), EMPTY, ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_nothing_to_normalise(name, size, masked):
    layer = NORMS[name][0](activation=jax.nn.silu)
    mask = jnp.ones((size[0], *size[2:]), bool) if masked else None
    y, (gradient, dx) = differentiate(layer, jnp.ones(size), jnp.ones(size), mask)
    assert y.shape == dx.shape == size
    assert not np.any(gradient.weight)
    assert not np.any(gradient.bias)


# --- What is kept, and what is computed.


@each_norm
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_x_is_kept_and_vectors(name, dtype):
    x = normal(0, SHAPE).astype(dtype)
    layer = NORMS[name][0](activation=jax.nn.silu)
    _, backward = jax.vjp(jax.vmap(layer), x)
    kept = [leaf for leaf in jax.tree.leaves(backward) if leaf.size >= x.size]
    assert [(k.shape, k.dtype) for k in kept] == [(SHAPE, dtype)]


def test_a_mask_is_kept_once_for_all_channels():
    layer = GroupNorm(2, 6)
    x, mask = normal(0, SHAPE), jnp.asarray(SOME)
    _, backward = jax.vjp(jax.vmap(lambda x, mask: layer(x, mask=mask)), x, mask)
    masks = [leaf.size for leaf in jax.tree.leaves(backward) if leaf.dtype == bool]
    assert max(masks) == mask.size


def test_rms_norm_sums_nothing_for_a_mean():
    """Neither forward nor backward: no pass has the second sum that a mean or a bias needs."""

    def gradients(layer, x, dy):
        return jax.vjp(lambda layer, x: jax.vmap(layer)(x), layer, x)[1](dy)

    x = normal(0, (32, 64))
    said = "both=False", "both=True", "eqx_norm_statistics"
    for layer, right in (
        (RMSNorm(64, use_bias=False), (True, False, False)),
        (LayerNorm(64), (False, True, True)),
    ):
        program = str(jax.make_jaxpr(gradients)(layer, x, x))
        assert tuple(word in program for word in said) == right


@each_norm
@pytest.mark.x32
def test_in_an_ensemble_of_layers(name):
    layers = [moved(NORMS[name][0]()), NORMS[name][0]()]
    arrays, rest = eqx.partition(layers[0], eqx.is_array)
    stacked = jax.tree.map(
        lambda a, b: jnp.stack([a, b]), arrays, eqx.filter(layers[1], eqx.is_array)
    )
    x = normal(0, (2, *SHAPE))
    y = jax.vmap(lambda arrays, x: jax.vmap(eqx.combine(arrays, rest))(x))(stacked, x)
    for i, layer in enumerate(layers):
        np.testing.assert_allclose(y[i], jax.vmap(layer)(x[i]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: GroupNorm(4, 6), r"groups=4 and channels=6.*multiple"),
        (lambda: GroupNorm(0, 6), r"groups=0 and channels=6"),
        (lambda: GroupNorm(2), r"channels=None.*channelwise_affine=False"),
        (
            lambda: GroupNorm(4, channelwise_affine=False)(jnp.ones(6)),
            r"groups=4 and channels=6",
        ),
        (lambda: InstanceNorm(0), r"channels=0"),
        (lambda: GroupNorm(2, 6)(jnp.ones((4, 6, 3))), r"\(4, 6, 3\).*looks like a batch"),
        (lambda: GroupNorm(2, 6)(jnp.ones(())), r"shape \(\).*channels=6"),
        (lambda: RMSNorm(6)(jnp.ones((4, 6))), r"looks like a batch.*jax\.vmap\(layer\)\(x\)"),
        (lambda: RMSNorm((2, 0)), r"shape=\(2, 0\)"),
        (lambda: RMSNorm(6, eps=0.0), r"eps=0\.0"),
        (lambda: GroupNorm(2, 6)(jnp.ones((6, 3)), mask=jnp.ones(6, bool)), r"mask has shape"),
        (lambda: GroupNorm(2, 0), "groups=2 and channels=0"),
    ],
)
def test_errors(call, words):
    with pytest.raises(ValueError, match=f"(?s){words}"):
        call()


def test_instance_norm_has_the_defaults_of_pytorch():
    layer = InstanceNorm(6)
    assert (layer.weight, layer.bias, layer.eps) == (None, None, 1e-5)


def test_integers_are_an_error():
    with pytest.raises(TypeError, match="int32"):
        RMSNorm(6)(jnp.ones(6, int).astype("int32"))


def test_complex_numbers():
    x = jax.lax.complex(normal(0, (5, 6), 1.0), normal(1, (5, 6), -2.0, 3.0))
    y = jax.vmap(RMSNorm(6, dtype=jnp.complex64))(x)
    scale = np.sqrt((np.abs(np.asarray(x)) ** 2).mean(1, keepdims=True) + EPS)
    np.testing.assert_allclose(y, np.asarray(x) / scale, rtol=1e-5)
    parts = jax.vmap(GroupNorm(2, 6, dtype=jnp.complex64))(x).reshape(5, 2, 3)
    np.testing.assert_allclose(np.mean(parts, 2), np.zeros((5, 2)), atol=1e-6)
    np.testing.assert_allclose((np.abs(parts) ** 2).mean(2), np.ones((5, 2)), rtol=1e-3)
