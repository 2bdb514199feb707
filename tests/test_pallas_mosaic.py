"""The Mosaic kernels: computed in Pallas's interpreter, lowered for GPUs that are not there.

The interpreter also tells where a thread might read what is being written, or the reverse.
What it cannot tell, experiments/compiled/assembly.py reads off the compiled code.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm._normalise import pallas_mosaic, pallas_mosaic_ring, reference, tiling
from eqx_norm._normalise.pallas_mosaic_activations import known
from eqx_norm._normalise.pallas_mosaic_ring import plgpu
from experiments.compiled import assembly

from .helpers import bits, f32
from .test_pallas_lowering import ACTIVATIONS, mesh, operands

CALL = "mosaic_gpu_v2"
OLD = jax.__version_info__ < pallas_mosaic._VERSION
needs_mosaic = pytest.mark.skipif(OLD, reason="the Mosaic kernels take jax 0.12")
# What is tested is arithmetic: it needs no program that took long to compile.
compiled = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
ULP = 2.0**-23  # of float32
EPS = 1e-5  # the layer's

# The same work cut up in other ways, so that few values get to all parts of a kernel: all
# chunks in one slice, more of them than slots; or a slice each, and there is much to merge.
CUTS = {
    "as it is": {},
    "loops": {"_PROGRAMS": 1, "_HELD": 8},
    "slices": {"_PROGRAMS": 2**20, "_HELD": 8, "_SLICE": 1},
}
# In float32 a tile is 32 channels wide, else 64.
SHAPES = {
    "whole chunks": (256, 64, 1),
    "a prime of rows": (397, 32, 1),
    "few rows": (3, 32, 1),
    "an ensemble of images": (2, 3, 64, 11),
}


@pytest.fixture
def cut(request, monkeypatch):
    for name, value in CUTS[request.param].items():
        monkeypatch.setattr(tiling, name, value)


def normal(shape, dtype="float32", mean=0.0, seed=0):
    values = np.random.RandomState(seed).standard_normal(shape)
    return jnp.asarray(values + mean, dtype)


def statistics(x, interpret=True):
    return compiled(functools.partial(pallas_mosaic.statistics, interpret=interpret))(x)


def check(x):
    count, mean, rest, m2 = (np.asarray(v, np.float64) for v in statistics(x))
    x = np.asarray(x, np.float64)
    axes = (-3, -1)
    n, exact, variance = x.shape[-3] * x.shape[-1], x.mean(axes), x.var(axes)
    assert np.all(count == n)
    # The bounds of the reference. Of the 1e-6 by which y may be wrong, this is a fifth.
    assert np.all(np.abs(mean + rest - exact) <= 2e-7 * np.sqrt(variance + EPS))
    assert np.all(np.abs(mean - exact) <= 4 * ULP * (np.abs(exact) + np.sqrt(variance)))
    assert np.all(np.abs(m2 / n - variance) <= 5e-7 * (variance + EPS))


@needs_mosaic
@pytest.mark.parametrize(
    ("cut", "shape"),
    [
        *(("as it is", shape) for shape in SHAPES),
        ("loops", "a prime of rows"),
        ("slices", "a prime of rows"),
    ],
    indirect=["cut"],
)
def test_statistics(cut, shape):
    check(normal(SHAPES[shape], mean=3.0))


@needs_mosaic
def test_statistics_of_half_precision():
    # No overflow at 300, whose squares float16 cannot hold.
    check(normal((301, 64, 1), "float16", mean=300.0))


@needs_mosaic
@pytest.mark.parametrize("mean", [1e3, 1e7])
def test_far_from_0(mean):
    check(normal((301, 32, 1), mean=mean))


@needs_mosaic
def test_an_outlier_in_first_place():
    check(normal((397, 32, 1)).at[0].set(-1e6))


@needs_mosaic
@pytest.mark.parametrize(
    ("cut", "length"), [("as it is", 7), ("loops", 121), ("slices", 121)], indirect=["cut"]
)
def test_constants_are_exact(cut, length):
    """https://github.com/BVLC/caffe/pull/3963"""
    constants = jnp.resize(f32([1e-3, 0.1, 1.0, -3.3, 65504.0, 16777213.0]), (32,))
    _, mean, rest, m2 = statistics(jnp.broadcast_to(constants[:, None], (length, 32, 1)))
    assert bits(mean) == bits(constants)
    assert not np.any(rest)
    assert not np.any(m2)


@needs_mosaic
def test_what_is_not_finite_stays_in_its_channel():
    x = normal((300, 32, 1))
    bad = x.at[200, 1].set(np.nan).at[7, 2].set(np.inf)
    before, after = np.stack(statistics(x)), np.stack(statistics(bad))
    assert bits(after[:, 3:]) == bits(before[:, 3:])
    assert not np.isfinite(after[1:, 1:3]).any()


@needs_mosaic
@pytest.mark.parametrize("cut", ["slices"], indirect=True)
def test_a_merge_of_merges(cut, monkeypatch):
    def small(partials, channels):
        return tiling.Tiling(64, 8, 1, 1, -(-partials // 64), 4)

    monkeypatch.setattr(tiling, "merge", small)
    x = normal((2100, 32, 1), mean=3.0)
    assert pallas_mosaic.geometry(x, 1).tiling.slices > 64
    check(x)
    x, vector, _ = operands(x.shape, "float32")
    assert lowered(pallas_mosaic.statistics, x) == 3
    assert pulled_sums(None, x, vector) == 3


def check_sums(activation, shape, dtype="float32", g_dtype="float32", interpret=True):
    mean, a, b = (normal((*shape[:-3], 1, shape[-2], 1), seed=i) for i in (2, 3, 4))
    rest = 1e-8 * a
    x, g = normal(shape, dtype), normal(shape, g_dtype, seed=5)
    function = functools.partial(pallas_mosaic.pulled_sums, activation, interpret=interpret)
    sums = compiled(function)(g, a, b, x, mean, rest)
    pulled = wide = g.astype(jnp.float32)
    if activation is not None:
        pulled = reference.slope(activation, wide, a, b, x, mean, rest)
    pulled, given = (np.asarray(array, np.float64) for array in (pulled, wide))
    d = np.asarray(reference.centred(x, mean, rest), np.float64)
    axes = (-3, -1)
    for got, factor in zip(sums, (1, d), strict=True):
        terms = pulled * factor
        assert got.shape == mean.shape
        assert got.dtype == jnp.float32
        error = np.abs(np.asarray(got, np.float64) - terms.sum(axes, keepdims=True))
        # The bound of weight and bias; and a slope is about 1, wrong by ulps of 1.
        most = 2e-7 * np.abs(terms).sum(axes, keepdims=True)
        if activation is not None:
            most += 4 * ULP * np.abs(given * factor).sum(axes, keepdims=True)
        assert np.all(error <= most)


@needs_mosaic
@pytest.mark.parametrize(
    ("cut", "shape"),
    [
        ("as it is", "an ensemble of images"),
        ("loops", "a prime of rows"),
        ("slices", "a prime of rows"),
    ],
    indirect=["cut"],
)
def test_pulled_sums(cut, shape):
    check_sums(jax.nn.silu, SHAPES[shape])


@needs_mosaic
@pytest.mark.parametrize("name", ["relu", "elu", "soft_sign"])
def test_pulled_sums_of_activations(name):
    check_sums(ACTIVATIONS[name], (37, 32, 1))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_in_other_words(name):
    """A slope is wrong by ulps of 1, of u (the exponent of a softplus) or of itself."""
    u, g = normal((999,)) * 4, normal((999,), seed=1)

    def slope(u, g):
        return jax.jvp(ACTIVATIONS[name], (u,), (g,))[1]

    expected, got = (np.asarray(jax.jit(f)(u, g)) for f in (slope, known(slope)))
    most = 4 * ULP * np.maximum(np.abs(g) * np.maximum(1, np.abs(u)), np.abs(expected))
    assert np.all((np.abs(got - expected) <= most) | (np.isnan(got) & np.isnan(expected)))


@needs_mosaic
def test_g_has_its_own_precision():
    check_sums(None, (37, 64, 1), dtype="bfloat16", g_dtype="float32")


# --- Races.


@pytest.fixture
def races():
    """The interpreter that looks for them. After it has found one it has to be cleaned up."""
    yield plgpu.InterpretGPUParams(detect_races=True)
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    interpret_pallas_call.reset_gpu_interpret_mode_state()


@needs_mosaic
@pytest.mark.parametrize("cut", ["loops"], indirect=True)
def test_no_races(cut, races):
    x = normal((397, 32, 1))
    assert pallas_mosaic.geometry(x, 1).tiling.chunks > 2 * pallas_mosaic_ring.STAGES
    statistics(x, races)
    check_sums(jax.nn.relu, x.shape, interpret=races)


@needs_mosaic
def test_no_races_in_a_merge(races):
    x = normal((397, 32, 1))
    assert pallas_mosaic.geometry(x, 1).tiling.slices > 1
    statistics(x, races)
    check_sums(jax.nn.relu, x.shape, interpret=races)


@needs_mosaic
@pytest.mark.parametrize("left_out", ["barrier_wait", "commit_smem"])
@pytest.mark.parametrize("cut", ["loops"], indirect=True)
def test_planted_races_are_found(cut, races, monkeypatch, left_out):
    monkeypatch.setattr(plgpu, left_out, lambda *_: None)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RACE DETECTED"):
        statistics(normal((397, 32, 1)), races)


# --- Lowered for a GPU.


def lowered(function, *arrays, on=None):
    """How many kernels it is lowered to."""
    with jax.sharding.use_abstract_mesh(on or mesh()):
        traced = jax.jit(function).trace(*arrays)
        return traced.lower(lowering_platforms=("cuda",)).as_text().count(CALL)


def pulled_sums(activation, x, vector, **keywords):
    function = functools.partial(pallas_mosaic.pulled_sums, activation)
    return lowered(function, x, vector, vector, x, vector, vector, **keywords)


@needs_mosaic
@pytest.mark.parametrize("kind", ["NVIDIA H200", "NVIDIA B200"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_on_each_gpu(kind, dtype):
    check_lowered((65536, 256, 1), dtype, kind)


@needs_mosaic
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_last_chunk_that_is_not_whole(dtype):
    check_lowered((4, 1021, 64, 3), dtype, "NVIDIA H200")


def check_lowered(shape, dtype, kind):
    x, vector, _ = operands(shape, dtype)
    assert pallas_mosaic.serves(x, None, jax.nn.relu) is None
    assert lowered(pallas_mosaic.statistics, x, on=mesh(kind)) == 2
    assert pulled_sums(jax.nn.relu, x, vector, on=mesh(kind)) == 2


@needs_mosaic
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_that_is_claimed(name):
    x, vector, _ = operands((64, 32, 1), "float32")
    if (why := pallas_mosaic.serves(x, None, ACTIVATIONS[name])) is not None:
        assert "pow" in why
        assert name == "a polynomial"
    else:
        assert pulled_sums(ACTIVATIONS[name], x, vector) == 1


@needs_mosaic
@pytest.mark.parametrize("check_vma", [True, False])
def test_between_shards(check_vma):
    """With its check of what varies over the mesh, and without."""
    x, vector, _ = operands((4096, 32, 1), "float32")
    spec = jax.sharding.PartitionSpec("x")

    def both(x, vector):
        vector = jax.lax.pcast(vector, "x", to="varying")
        mean = pallas_mosaic.statistics(x)[1][None, :, None] + 0 * vector
        return pallas_mosaic.pulled_sums(jax.nn.relu, x, vector, vector, x, mean, vector)

    mapped = jax.shard_map(
        both,
        mesh=mesh(size=2),
        in_specs=(spec, jax.sharding.PartitionSpec()),
        out_specs=spec,
        check_vma=check_vma,
    )
    assert lowered(mapped, x, vector, on=mesh(size=2)) == 4


@needs_mosaic
def test_with_64_bits_and_strict_dtypes():
    x, vector, _ = operands((4097, 64, 1), "bfloat16")
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        assert lowered(pallas_mosaic.statistics, x) == 2
        assert pulled_sums(jax.nn.silu, x, vector) == 2


# --- What it says.


def why(shape, dtype="float32", mask=None, activation=None):
    return str(pallas_mosaic.serves(jax.ShapeDtypeStruct(shape, dtype), mask, activation))


@needs_mosaic
def test_what_it_does_not_serve_it_says():
    assert why((8, 32, 1)) == "None"
    assert "64 channels of bfloat16, and x has 32" in why((8, 32, 1), "bfloat16")
    assert "32 channels of float32, and x has 100" in why((8, 100, 1))
    assert "float64" in why((8, 32, 1), "float64")
    assert "empty" in why((0, 32, 1))
    assert "mask" in why((8, 32, 1), mask=jax.ShapeDtypeStruct((8, 1, 1), "bool"))
    assert "rows" in why((2**16, 32, 2**16))
    assert "rows" in why((2**16 + 1, 8, 32, 1))
    assert "cumsum" in why((8, 32, 1), activation=lambda u: jnp.cumsum(u[None])[0])


@needs_mosaic
def test_on_a_gpu_of_before(monkeypatch):
    class Device:
        device_kind, compute_capability = "NVIDIA A100-SXM4-80GB", "8.0"

    monkeypatch.setattr(jax, "devices", lambda platform: [Device])
    assert "A100" in why((8, 32, 1))
    Device.compute_capability = "10.0"
    assert why((8, 32, 1)) == "None"


@pytest.mark.skipif(not OLD, reason="of a jax that has it")
def test_a_jax_of_before():
    assert f"take jax 0.12, and this is jax {jax.__version__}" in why((8, 32, 1))


def test_a_jax_without_the_backend(monkeypatch):
    monkeypatch.setattr(pallas_mosaic, "plgpu", None)
    assert jax.__version__ in why((8, 32, 1))


# --- What is read off the code.

LOOP = """
    ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1];
    fence.proxy.async.shared::cta;
    bar.sync %r5, 128;
    cp.async.bulk.tensor.4d.shared::cta.global.mbarrier::complete_tx::bytes [%r6], [%rd2];
"""


def test_copies_before_all_have_read():
    assert not assembly.unfenced(LOOP * 2)
    lines = LOOP.splitlines()
    assert assembly.unfenced("\n".join(line for line in lines if "bar.sync" not in line))
    assert assembly.unfenced("\n".join(line for line in lines if "fence" not in line))
    assert assembly.unfenced("\n".join([lines[1], lines[3], lines[2], lines[4]]))
