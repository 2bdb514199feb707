"""Tests that all backends of the two passes that sum keep one bound: XLA, and kernels.

That the kernels are lowered for a GPU, test_lowering.py tells.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm._normalise.gpu import lanes
from eqx_norm._normalise.gpu.passes import Backend
from eqx_norm._normalise.gpu.triton import Triton
from tests.helpers import bits, f32

from .backends import (
    ACTIVATIONS,
    BACKENDS,
    CUTS,
    check_statistics,
    check_sums,
    normal,
    operands,
    some,
    statistics,
)

SHAPES = {
    "columns": (37, 5, 1),
    "full tiles": (256, 64, 1),
    "a prime of rows": (397, 32, 1),
    "many rows": (1021, 33, 1),
    "few rows": (3, 32, 1),
    "one row": (1, 3, 1),
    "images": (7, 17, 11),
    "an ensemble": (2, 3, 129, 5, 1),
    "an ensemble of images": (2, 3, 64, 11),
    "rows": (5, 1, 1, 1023),
    "rows of one value": (3, 1, 1, 1),
    "rows of 7": (9, 1, 1, 7),
    "long rows": (2, 1, 1, 2500),
    "rows of images": (3, 3, 1100),
    "an ensemble of rows": (2, 2, 3, 1024),
    "one channel": (37, 1, 5),
    "many slices": (40001, 8, 1),
}
# Those in which a kernel loops over chunks, or merges what several programs found.
ELSEWISE_CUT = (
    *itertools.product(["loops"], ["a prime of rows", "long rows"], [False, True]),
    *itertools.product(["slices"], ["images", "rows of images"], [False, True]),
    ("slices", "a prime of rows", False),
)


@pytest.fixture
def backend(request, monkeypatch):
    found = BACKENDS[request.param]
    if isinstance(found, Triton):
        # It adds lanes in a tree; the interpreter would add one after the other.
        monkeypatch.setattr(lanes, "total", by_tree)
    return found


def by_tree(values, axis):
    while (half := values.shape[axis] // 2) > 0:
        front, back = jnp.split(values, [half], axis)
        values = front + back
    return values.squeeze(axis)


def grid(*cases, dtype="float32"):
    """Parametrises a test by each case (cut, shape, masked) and the backends that serve it."""
    rows = []
    for (cut, name, masked), backend in itertools.product(cases, BACKENDS):
        shape = SHAPES.get(name, name)
        x, _, mask = operands(shape, dtype, masked=masked)
        # Without kernels nothing is cut.
        if (backend == "xla" and cut != "as it is") or BACKENDS[backend].serves(x, *mask):
            continue
        identity = "-".join(map(str, (backend, cut, name, masked)))
        rows.append(pytest.param(backend, cut, shape, masked, id=identity))
    names = ("backend", "cut", "shape", "masked")
    return pytest.mark.parametrize(names, rows, indirect=["backend", "cut"])


@grid(
    *itertools.product(["as it is"], SHAPES, [False, True]),
    # More than one program can merge.
    *itertools.product(["slices"], ["many slices"], [False, True]),
    *ELSEWISE_CUT,
)
def test_statistics(backend, cut, shape, masked):
    check_statistics(backend, normal(shape, mean=3.0), some(shape) if masked else None)


@pytest.mark.parametrize(
    ("dtype", "mean", "first"),
    [
        *(("float32", mean, None) for mean in (1e3, 1e5, 1e7)),
        *(("float32", 0, first) for first in (1e3, -1e6)),  # an outlier in first place
        *((half, 300, None) for half in ("bfloat16", "float16")),  # which cannot hold 300**2
    ],
)
@grid(*itertools.product(["as it is"], ["images", (2, 1, 1, 1023), (301, 64, 1)], [False]))
def test_statistics_far_from_0(backend, cut, shape, masked, dtype, mean, first):
    x = normal(shape, dtype, mean)
    check_statistics(backend, x if first is None else x.at[..., 0, :, 0].set(first))


@grid(
    *itertools.product(["as it is"], [(7, 32, 1), (6, 1, 1, 7)], [False, True]),
    *itertools.product(CUTS, [(121, 32, 1), (6, 1, 1, 300)], [False, True]),
)
def test_constants_are_exact(backend, cut, shape, masked):
    """Tests the failure of https://github.com/BVLC/caffe/pull/3963."""
    vector = (1, shape[1], 1) if shape[1] > 1 else (shape[0], 1, 1, 1)
    constants = jnp.resize(f32([1e-3, 0.1, 1.0, -3.3, 65504.0, 16777213.0]), vector)
    x = jnp.broadcast_to(constants, shape)
    count, mean, m2, rest = statistics(backend, x, some(shape) if masked else None)
    expected = np.where(np.asarray(count).ravel() > 0, np.asarray(constants).ravel(), 0)
    np.testing.assert_array_equal(np.asarray(mean).ravel(), expected)
    assert not np.any(rest)
    assert not np.any(m2)


@grid(*itertools.product(["as it is"], [(37, 3, 1), (2, 1, 1, 300)], [True]))
def test_what_does_not_count_is_not_looked_at(backend, cut, shape, masked):
    x, mask = normal(shape), some(shape)
    hidden = jnp.where(mask, x, jnp.nan)
    assert bits(statistics(backend, x, mask)[1]) == bits(statistics(backend, hidden, mask)[1])
    nothing = statistics(backend, x * jnp.inf, jnp.zeros_like(mask))
    assert not np.any(np.stack(nothing))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@grid(("as it is", (300, 32, 1), False))
def test_what_is_not_finite_stays_in_its_channel(backend, cut, shape, masked, bad):
    x = normal(shape)
    before = np.stack(statistics(backend, x))
    after = np.stack(statistics(backend, x.at[200, 1].set(bad)))
    others = [0, *range(2, 32)]
    assert bits(after[:, others]) == bits(before[:, others])
    assert not np.isfinite(after[1:, 1]).any()


@grid(
    *itertools.product(["as it is"], ["columns", "an ensemble", "rows of 7"], [False]),
    *itertools.product(["as it is"], ["images", "rows", "one channel"], [True]),
    ("as it is", "an ensemble of images", False),
    ("slices", "many slices", False),
    *ELSEWISE_CUT,
)
def test_vjp_sums(backend, cut, shape, masked):
    check_sums(backend, jax.nn.silu, shape, masked)


@pytest.mark.parametrize("name", ["none", "relu", "tanh", "gelu", "elu", "soft_sign"])
@grid(("as it is", (37, 5, 1), True), ("as it is", (37, 32, 1), False))
def test_vjp_sums_of_activations(backend, cut, shape, masked, name):
    check_sums(backend, ACTIVATIONS.get(name), shape, masked)


@pytest.mark.parametrize("g_dtype", ["float32", "bfloat16"])
@grid(("as it is", (37, 64, 1), False), dtype="bfloat16")
def test_g_has_its_own_precision(backend, cut, shape, masked, g_dtype):
    check_sums(backend, None, shape, dtype="bfloat16", g_dtype=g_dtype)


@grid(("loops", (1, 1, 1, 2**17), False))
def test_equal_values_do_not_round_the_same_way(backend, cut, shape, masked):
    """Adds hundreds of them in each lane, and in all the same: no error is averaged out."""
    g, zero = jnp.full(shape, 0.1), jnp.zeros((1, 1, 1, 1))
    sum_g, _ = jax.jit(lambda g: backend.vjp_sums(None, g, None, None, g, zero, zero))(g)
    exact = g.size * np.float64(np.float32(0.1))
    assert abs(float(sum_g[0, 0, 0, 0]) - exact) <= 2e-7 * exact


# --- What a backend does not serve, it says.

ARRAY = jnp.arange(3.0)


def exact_gelu(u):
    return jax.nn.gelu(u, approximate=False)


def in_half_precision(u):
    return jnp.tanh(u.astype(jnp.bfloat16)).astype(jnp.float32)


REFUSED = [
    ((8, 64, 1), "float32", None, "None"),
    ((8, 64, 1), "bfloat16", jax.nn.silu, "None"),
    ((8, 64, 1), "float64", None, "float64"),
    ((8, 64, 1), "complex64", None, "complex64"),
    ((0, 64, 1), "float32", None, "empty"),
    ((2**16, 64, 2**16), "float32", None, "rows"),
    ((8, 64, 1), "float32", exact_gelu, "erfc"),
    ((8, 64, 1), "float32", lambda u: jnp.cumsum(u[None])[0], "cumsum"),
    ((8, 64, 1), "float32", in_half_precision, "bfloat16"),
    ((8, 64, 1), "float32", lambda u: u.sum(0), "(axis 0"),
    ((8, 64, 1), "float32", lambda u: u * ARRAY[1], "arrays of its own"),
]
BY_MOSAIC = [
    ((8, 32, 1), "bfloat16", None, "64 channels of bfloat16, and x has 32"),
    ((8, 100, 1), "float32", None, "32 channels of float32, and x has 100"),
    ((2**16 + 1, 8, 32, 1), "float32", None, "rows"),
    ((64, 32, 1), "float32", ACTIVATIONS["a polynomial"], "pow"),
]
KERNELS = [name for name, backend in BACKENDS.items() if isinstance(backend, Backend)]


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "activation", "reason"),
    [
        *((name, *row) for name in KERNELS for row in REFUSED),
        *(("mosaic", *row) for row in BY_MOSAIC if "mosaic" in KERNELS),
    ],
)
def test_what_it_does_not_serve_it_says(name, shape, dtype, activation, reason):
    x = jax.ShapeDtypeStruct(shape, dtype)
    assert reason in str(BACKENDS[name].serves(x, None, activation))
