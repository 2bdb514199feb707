"""Which program is compiled for a CUDA device, read on a machine that has none.

That the kernels compute the right thing, test_backends.py holds.
"""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from eqx_norm import BatchNorm, LayerNorm
from tests.helpers import over_batch
from tests.processes import on_devices

from .gpus import CORES, H200, HAS_MOSAIC, mesh

FORWARD, BACKWARD = "eqx_norm_statistics", "eqx_norm_vjp_sums"
ROWS, ROWS_VJP = "eqx_norm_rows", "eqx_norm_rows_vjp"
# 8 MiB of float32, and 4 values.
DENSE, SMALL = (2048, 1024), (2, 2)

each_device = pytest.mark.parametrize("device", CORES)
each_dtype = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])


def lowered(f, *shaped, device=H200):
    """Returns the text of what XLA would be given."""
    with jax.sharding.use_abstract_mesh(mesh(device)):
        return jax.jit(f).trace(*shaped).lower(lowering_platforms=("cuda",)).as_text()


def kernels(text):
    """The kernels in it, but for those that merge the results of others."""
    if "__gpu$xla.gpu.triton" not in text:
        return set()
    names = (FORWARD, BACKWARD, ROWS, ROWS_VJP)
    return {name for name in names if re.search(rf"\b{name}\b", text)}


def forward(shape, dtype=jnp.float32, axis_name="batch", **arguments):
    """Of a whole layer; and its x."""

    def f(x):
        make = eqx.nn.make_with_state(BatchNorm)
        layer, state = make(shape[1], axis_name, approach="batch", **arguments)
        return over_batch(layer)(x, state)

    return f, jax.ShapeDtypeStruct(shape, dtype)


def both(shape, dtype=jnp.float32, **arguments):
    f, x = forward(shape, dtype, **arguments)

    def g(x, dy):
        y, pull_back, state = jax.vjp(f, x, has_aux=True)
        return y, pull_back(dy), state

    return g, x, x


@each_device
@each_dtype
@pytest.mark.parametrize("shape", [(8192, 1024), (64, 64, 32, 32)], ids=["dense", "images"])
def test_auto_takes_a_kernel_each_way(shape, dtype, device):
    text = lowered(*both(shape, dtype, activation=jax.nn.relu), device=device)
    # Images of float32 may lie channel after channel.
    to_xla = len(shape) > 2 and dtype == jnp.float32
    assert kernels(text) == (set() if to_xla else {FORWARD, BACKWARD})


@pytest.mark.parametrize(
    "activation", [None, jax.nn.silu, jax.nn.gelu], ids=["none", "silu", "gelu"]
)
def test_with_other_activations(activation):
    text = lowered(*both(DENSE, activation=activation))
    assert kernels(text) == {FORWARD, BACKWARD}


def test_xla_takes_none():
    assert kernels(lowered(*both(DENSE, implementation="xla"))) == set()


def test_what_is_small_is_left_to_xla_unless_asked_for():
    assert kernels(lowered(*both(SMALL))) == set()
    text = lowered(*both(SMALL, implementation="pallas_triton"))
    assert kernels(text) == {FORWARD, BACKWARD}


has_mosaic = pytest.mark.skipif(not HAS_MOSAIC, reason="jax 0.12's Mosaic")


@has_mosaic
def test_mosaic_if_asked_for():
    text = lowered(*both((8192, 1024), jnp.bfloat16, implementation="pallas_mosaic"))
    assert text.count("mosaic_gpu") >= 2
    assert "xla.gpu.triton" not in text


@has_mosaic
@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((8192, 100), "tiles of 64 channels of bfloat16, and x has 100"),
        (None, r"and x has 1\."),
    ],
    ids=["channels", "rows"],
)
def test_what_mosaic_cannot_serve(shape, reason):
    arguments = {"dtype": jnp.bfloat16, "implementation": "pallas_mosaic"}
    program = both(shape, **arguments) if shape else layer_norm(4096, 768, **arguments)
    with pytest.raises(ValueError, match=f"'pallas_mosaic' cannot serve x .*{reason}"):
        lowered(*program)


@pytest.mark.skipif(HAS_MOSAIC, reason="before jax 0.12")
def test_mosaic_with_a_jax_that_has_no_such_thing():
    with pytest.raises(ValueError, match=r"the Mosaic kernels take jax 0\.12, and this is jax"):
        lowered(*both((8192, 1024), jnp.bfloat16, implementation="pallas_mosaic"))


def test_images_of_float32_if_asked_for():
    text = lowered(*both((64, 64, 32, 32), implementation="pallas_triton"))
    assert kernels(text) == {FORWARD, BACKWARD}


def test_an_activation_with_arrays_leaves_the_sums_to_xla():
    """XLA can fuse its derivative into them."""
    assert kernels(lowered(*both(DENSE, activation=eqx.nn.PReLU(0.25)))) == {FORWARD}


def test_inference_takes_none():
    assert kernels(lowered(*forward(DENSE, inference=True))) == set()


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: jax.vmap(f),
        lambda f: lambda x, dy: jax.lax.scan(lambda c, _: (c, f(*c)), (x, dy), length=2)[1],
        lambda f: lambda x, dy: jax.lax.map(lambda pair: f(*pair), (x, dy)),
        lambda f: jax.checkpoint(f),
    ],
    ids=["ensemble", "scan", "map", "remat"],
)
def test_under_transformations(transform, request):
    f, *shaped = both(DENSE, activation=jax.nn.relu)
    name = request.node.callspec.id
    if name in ("ensemble", "map"):
        shaped = [jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for x in shaped]
    assert kernels(lowered(transform(f), *shaped)) == {FORWARD, BACKWARD}


def test_second_order_and_forward_mode():
    f, x = forward(DENSE, activation=jax.nn.silu)

    def penalty(x):
        gradient = jax.grad(lambda x: jnp.sum(f(x)[0] ** 2))(x)
        return jnp.sum(gradient**2)

    assert kernels(lowered(jax.grad(penalty), x)) == {FORWARD, BACKWARD}
    assert kernels(lowered(lambda x, dx: jax.jvp(f, (x,), (dx,)), x, x)) == {FORWARD}


def test_a_mask():
    def f(x, mask):
        make = eqx.nn.make_with_state(BatchNorm)
        layer, state = make(1024, "batch", approach="batch")

        def one(x, mask):
            return layer(x, state, mask=mask)

        return jax.vmap(one, axis_name="batch", out_axes=(0, None))(x, mask)

    x, mask = jax.ShapeDtypeStruct(DENSE, jnp.float32), jax.ShapeDtypeStruct(DENSE[:1], bool)
    assert kernels(lowered(f, x, mask)) == {FORWARD}


def layer_norm(*shape, dtype=jnp.float32, **arguments):
    """Forward and backward over (examples, values); and its arguments."""
    layer = LayerNorm(shape[-1], **arguments)

    def f(layer, x, dy):
        y, pull_back = jax.vjp(lambda layer, x: jax.vmap(layer)(x), layer, x)
        return y, pull_back(dy)

    x = jax.ShapeDtypeStruct(shape, dtype)
    return f, layer, x, x


@each_device
@each_dtype
def test_layer_norm_reads_a_row_once_each_way(dtype, device):
    text = lowered(*layer_norm(4096, 768, dtype=dtype, activation=jax.nn.gelu), device=device)
    assert kernels(text) == {ROWS, ROWS_VJP}


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({"implementation": "xla"}, set()),
        ({"use_weight": False, "use_bias": False}, {ROWS, ROWS_VJP}),
        ({"use_bias": False}, {ROWS, ROWS_VJP}),
        # What has arrays of its own is composed of the passes.
        ({"activation": eqx.nn.PReLU(0.25)}, {FORWARD}),
    ],
    ids=["xla", "plain", "weight", "prelu"],
)
def test_layer_norm_with(arguments, found):
    assert kernels(lowered(*layer_norm(4096, 768, **arguments))) == found


def test_layer_norm_of_rows_that_no_program_holds_or_of_few():
    assert kernels(lowered(*layer_norm(64, 20000))) == {FORWARD}
    assert kernels(lowered(*layer_norm(64, 64))) == set()
    text = lowered(*layer_norm(64, 64, implementation="pallas_triton"))
    assert kernels(text) == {ROWS, ROWS_VJP}


def test_layer_norm_under_transformations():
    f, layer, x, dy = layer_norm(2048, 768, activation=jax.nn.silu)
    one_each = jax.tree.map(lambda v: jnp.stack([v, v]) if eqx.is_array(v) else v, layer)
    stacked = jax.ShapeDtypeStruct((2, *x.shape), x.dtype)
    # Weights of its own for each member of an ensemble: composed of the passes.
    assert kernels(lowered(jax.vmap(f), one_each, stacked, stacked)) <= {FORWARD, BACKWARD}
    assert kernels(lowered(jax.checkpoint(f), layer, x, dy)) == {ROWS, ROWS_VJP}

    def in_turn(layer, x, dy):
        return jax.lax.map(lambda pair: f(layer, *pair), (x, dy))

    assert kernels(lowered(in_turn, layer, stacked, stacked)) == {ROWS, ROWS_VJP}

    def penalty(x):
        return jnp.sum(jax.grad(lambda x: jnp.sum(jax.vmap(layer)(x) ** 2))(x) ** 2)

    assert kernels(lowered(jax.grad(penalty), x)) == {ROWS, ROWS_VJP}
    g = jax.vmap(layer)
    assert kernels(lowered(lambda x, dx: jax.jvp(g, (x,), (dx,)), x, x)) == {ROWS}


def test_layer_norm_asked_for_a_kernel_elsewhere():
    f, *arguments = layer_norm(64, 64, implementation="pallas_triton")
    with pytest.raises(ValueError, match="implementation='pallas_triton' is for CUDA devices"):
        jax.jit(f).lower(*arguments)


def test_what_is_exported_has_none():
    """`jax.export` refuses custom calls that it cannot promise to keep."""
    f, x = forward(DENSE)
    exported = jax.export.export(jax.jit(lambda x: f(x)[0]), platforms=("cuda", "cpu"))(x)
    assert kernels(str(exported.mlir_module())) == set()


@pytest.mark.parametrize("implementation", ["auto", "pallas_triton"])
def test_operands_that_jit_has_sharded_are_not_gathered(implementation):
    """In a process of its own, which has two devices."""
    script = SHARDED.format(implementation=implementation)
    ran = on_devices(2, "-W", "error", "-c", script)
    said = {"auto": "no kernel", "pallas_triton": "ValueError: XLA partitions this program"}
    assert ran.stdout.splitlines() == [said[implementation], "a kernel inside shard_map"]


SHARDED = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from tests.operation.gpu.test_choice import forward, kernels, lowered

auto = (jax.sharding.AxisType.Auto,)
mesh = jax.make_mesh((2,), ("devices",), axis_types=auto)
f, x = forward((4096, 1024), implementation="{implementation}")
x = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P("devices")))
try:
    text = jax.jit(f).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    print("a kernel" if kernels(text) else "no kernel")
except ValueError as error:
    assert "shard_map" in str(error)
    print("ValueError: XLA partitions this program" * ("XLA partitions" in str(error)))

device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
mesh = jax.sharding.AbstractMesh((2,), ("devices",), auto, abstract_device=device)
f, _ = forward((2048, 1024), implementation="{implementation}", axis_name=["batch", "devices"])
specs = dict(in_specs=P("devices"), out_specs=P("devices"), check_vma=False)
with jax.sharding.use_abstract_mesh(mesh):
    g = jax.shard_map(lambda x: f(x)[0], mesh=mesh, **specs)
    x = jax.ShapeDtypeStruct(x.shape, x.dtype)
    text = jax.jit(g).trace(x).lower(lowering_platforms=("cuda",)).as_text()
print("a kernel inside shard_map" if kernels(text) else "none")
"""


def test_a_kernel_is_for_cuda():
    f, x = forward(SMALL, implementation="pallas_triton")
    with pytest.raises(ValueError, match="implementation='pallas_triton' is for CUDA devices"):
        jax.jit(f).lower(x)


def test_a_dtype_that_no_kernel_takes():
    with jax.enable_x64(True):
        f, *shaped = both(DENSE, jnp.float64)
        assert kernels(lowered(f, *shaped)) == set()
        f, *shaped = both(DENSE, jnp.float64, implementation="pallas_triton")
        with pytest.raises(ValueError, match=r"cannot serve x of shape .*float64.*'auto'"):
            lowered(f, *shaped)
