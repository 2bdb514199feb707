"""Tests the variant of sums and statistics for a CPU: sums in trees, statistics in float64."""

import math
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm import BatchNorm, GroupNorm, InstanceNorm, LayerNorm, RMSNorm
from eqx_norm._jax import jaxprs
from eqx_norm._normalise.variants import on_cpu
from tests.compiling import jit
from tests.helpers import f32, make, normal, over_batch, y_and_gradients
from tests.layers.norms import made

RANDOM = np.random.RandomState(0)
# Sums over examples and places, over either, in groups; empty, odd, prime, whole cache lines.
TOTALS = [((1, 1, 1), (0, 2)), ((37, 5, 101), (0, 2)), ((64, 2, 1024), (0, 2))]
TOTALS += [((6, 3, 48 * 32), (0, 2)), ((4099, 2, 1), (0, 2)), ((31, 5, 1), (0, 2))]
TOTALS += [((2, 3, 0), (0, 2)), ((0, 3, 5), (0, 2)), ((4096, 16), (0,)), ((2, 8191), (1,))]
TOTALS += [((2, 384), (1,)), ((3, 32, 4, 96), (1, 3)), ((2, 3, 11, 5, 77), (2, 4))]


@pytest.mark.parametrize(("shape", "axes"), TOTALS, ids=str)
def test_tree_sums(shape, axes):
    """Sums integers, which is exact in any order."""
    values = RANDOM.randint(-9, 10, (2, *shape))
    expected = values.astype(np.float64).sum(tuple(axis + 1 for axis in axes), keepdims=True)
    both = jit(lambda first, second: on_cpu.tree_sums([first, second], axes))(*f32(values))
    (alone,) = jit(lambda values: on_cpu.tree_sums([values], axes))(f32(values[0]))
    for actual, sums in zip((*both, alone), (*expected, expected[0]), strict=True):
        np.testing.assert_array_equal(actual, sums)
        assert actual.dtype == np.float32


@pytest.mark.parametrize("length", [192, 729, 784, 1000, 1280, 5003])
def test_rows_are_summed_in_whole_cache_lines(length):
    """Fails if a loop adds along the numbers of a row, over less than a line at a time, or only
    a few lines."""
    sums = jax.make_jaxpr(lambda x: on_cpu.tree_sums([x, x], (1,)))(jnp.zeros((8, length)))
    shapes = [e.invars[0].aval.shape for e in sums.eqns if e.primitive.name == "reduce"]
    in_lines = [shape for shape in shapes if shape[-1] == 16 and len(shape) > 2]
    longest = max(in_lines, key=math.prod)
    assert math.prod(longest[1:]) > 0.9 * length
    assert longest[-2] >= 8  # added at a time


# Whole cache lines, the same positions of several examples, rows, columns.
SHAPES = [(32, 4, 3136), (32, 8, 49), (1, 16, 1024), (512, 64, 1)]


@jit
def statistics(x):
    return [v[0, :, 0] for v in on_cpu.statistics(x, shape=(1, x.shape[1], 1))]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("outlier", [0, 1e4, -1e15])
@pytest.mark.parametrize(("mean", "dtype"), [(0, "float32"), (1e6, "float32"), (0, "bfloat16")])
def test_statistics_have_48_bits(shape, outlier, mean, dtype):
    """Checks that the mean and its rest have 48 bits, and that m2 is rounded once.

    A number takes part in at most n/16 + 48 additions, because the first level sums 16 or more.
    An addition rounds by 2^-53 of a sum of at most n (sqrt(n) + 1) standard deviations.
    """
    x = normal(0, shape, mean, 1)
    x = x.at[0, :, 0].add(outlier).astype(dtype)
    count, *moments = statistics(x)
    computed, m2, rest = (np.asarray(v, np.float64) for v in moments)
    exact = np.asarray(x, np.float64)
    expected = exact.mean((0, 2))
    squares = (exact - expected[:, None]) ** 2
    n = shape[0] * shape[2]
    rounding = 2**-53 * (n / 16 + 48) * (n**0.5 + 1) * squares.mean((0, 2)).max() ** 0.5
    np.testing.assert_array_equal(count, n)
    np.testing.assert_allclose(computed + rest, expected, rtol=2**-47, atol=rounding)
    np.testing.assert_allclose(m2, squares.sum((0, 2)), rtol=2**-23)


# A batch norm in inference, with its state.
INFERENCE = jax.tree_util.Partial(
    lambda model, x: model[0](x, model[1])[0],
    make(256, "batch", approach="batch", inference=True),
)
# The numbers of reads of x (for the mean, of a row's first value), and of loops: statistics,
# partial sums, rstd, the mean and rstd, y. A small x of half precision is first written as
# float32.
FORWARD = [
    (LayerNorm(384), (512, 384), "float32", 3, 5),
    (LayerNorm(384), (512, 384), "bfloat16", 3, 5),
    (LayerNorm(512), (64, 512), "bfloat16", 1, 6),
    (LayerNorm(384, activation=jax.nn.gelu), (512, 384), "bfloat16", 3, 5),
    (LayerNorm(64, axis=0), (8, 64), "float32", 3, 5),
    (RMSNorm(384), (512, 384), "float32", 2, 3),
    (RMSNorm(384), (6304, 384), "bfloat16", 2, 3),
    (GroupNorm(8, 64), (8, 64, 14, 14), "float32", 3, 6),
    (InstanceNorm(64), (8, 64, 14, 14), "float32", 4, 7),  # 12 lines, and 4 numbers
    (InstanceNorm(64), (8, 64, 28, 28), "float32", 4, 7),  # 48 lines, and one
    (InstanceNorm(64), (8, 64, 7, 7), "bfloat16", 1, 6),
    (INFERENCE, (2048, 256), "float32", 1, 2),
]


@pytest.mark.parametrize(("layer", "shape", "dtype", "reads", "loops"), FORWARD)
def test_loops_and_reads_of_x_without_differentiation(layer, shape, dtype, reads, loops):
    arrays, static = eqx.partition(layer, eqx.is_array)
    program = jax.jit(lambda arrays, x: jax.vmap(eqx.combine(arrays, static))(x))
    compiled = program.lower(arrays, jnp.zeros(shape, dtype)).compile()
    _, _, body = str(compiled.as_text()).partition("\nENTRY")
    fusions = [line for line in body.splitlines() if " fusion(" in line]
    whole = [line for line in fusions if re.search(r"fusion\(.*%x\b", line)]
    assert len(whole) <= reads
    assert len(fusions) <= loops
    is_small = math.prod(shape) <= 2**15  # waking a thread takes longer than its work
    assert not (is_small and '"outer_dimension_partitions":["' in body)


@pytest.mark.parametrize("shape", [(1, 64), (3, 96), (2, 128)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_few_short_rows_wake_no_threads(shape, dtype):
    """Fails if XLA passes sums to its library, or splits a loop over threads."""
    layer = RMSNorm(shape[1:])
    program = jax.jit(jax.vmap(layer)).lower(jnp.zeros(shape, dtype)).compile()
    _, _, body = str(program.as_text()).partition("\nENTRY")
    assert "kind=kCustom" not in body
    assert '"outer_dimension_partitions":["' not in body


@pytest.mark.parametrize(
    ("name", "shape"),
    [("LayerNorm", (64, 384)), ("GroupNorm", (8, 12, 14, 14)), ("BatchNorm", (64, 32))],
)
def test_one_loop_computes_the_means(name, shape):
    """Counts the roundings of float64 means to float32, one in each loop that computes means.
    If the loops that read means computed them, LLVM would not vectorise these loops."""
    layer, call = made(name, shape[1:])
    weights, static = eqx.partition(layer, eqx.is_inexact_array)

    def forward(weights, x):
        return call(eqx.combine(weights, static), x)[0]

    program = jax.jit(lambda weights, x: y_and_gradients(forward, x, weights, x))
    compiled = program.lower(weights, jnp.zeros(shape)).compile()
    assert str(compiled.as_text()).count("reduce-precision(") == 1


def test_training_step_of_a_batch_norm_is_quick_to_compile():
    """Counts JAX's operations, each of which is traced, mapped, differentiated and lowered;
    kernels; and loops that LLVM takes long to compile: a `reduce-window`, which is a reduction
    of one array of bools, a concatenate of computed floats, and one loop of 17 to 49
    additions."""
    layer, state = make(64, "batch", approach="batch")
    weights, static = eqx.partition(layer, eqx.is_inexact_array)

    def loss(weights, x, state):
        y, state = over_batch(eqx.combine(weights, static))(x, state)
        return (y**2).sum(), state

    step = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    traced = step.trace(weights, jnp.zeros((8, 64, 28, 28)), state)
    assert len([*jaxprs.equations(traced.jaxpr)]) <= 179
    lowered = traced.lower()
    assert lowered.as_text().count("\n") <= 453
    program = str(lowered.compile().as_text())
    assert program.partition("\nENTRY")[2].count(" fusion(") <= 16
    assert " reduce-window(" not in program
    assert not re.search(r" f\d\d\S+ concatenate\(", program)
    assert not re.search(r"\[[\d,]*64,49\]\S* (bitcast|parameter)\(", program)


def test_layers_of_one_width_update_their_statistics_by_the_same_kernels():
    """Fails if an array that layers share is an operand of their kernels: its place among the
    operands differs, and LLVM compiles each layer's kernels."""

    def network():
        return eqx.nn.Sequential([BatchNorm(32, "batch", approach="batch") for _ in range(3)])

    model, state = eqx.nn.make_with_state(network)()
    text = str(jax.jit(over_batch(model)).lower(jnp.ones((64, 32)), state).compile().as_text())
    functions = re.findall(r"^%fused_computation.*?^\}", text, re.DOTALL | re.MULTILINE)
    averages_or_finite = re.compile(r"-> (f32\[2,2,32\]|\(pred\[\], pred\[\]\)) ")
    updates = [f for f in functions if averages_or_finite.search(f)]
    assert len(updates) == 6
    assert len({*map(with_numbered_names, updates)}) == 2


def with_numbered_names(function: str) -> str:
    """Returns a function of HLO with names by order of appearance, without its metadata."""
    numbers = {}
    function = re.sub(r", metadata=\{[^}]*\}", "", function)

    def number(name: re.Match[str]) -> str:
        return numbers.setdefault(name[0].lstrip("%"), f"%{len(numbers)}")

    return re.sub(r"%?\b(param_[\w.]+)|%[\w.-]+", number, function)


def test_activation_is_called_with_the_shape_of_x():
    """Computes y without differentiation, for which x is reshaped to rows."""
    layer = LayerNorm(8, activation=lambda u: jnp.tanh(u) if u.ndim == 1 else u)
    x = f32(normal(0, (4, 8), 0, 1))
    expected = np.tanh(jax.vmap(LayerNorm(8))(x))
    np.testing.assert_allclose(jax.jit(jax.vmap(layer))(x), expected, rtol=1e-6)
