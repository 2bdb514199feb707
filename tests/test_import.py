"""What `import eqx_norm` loads, counted in modules: a time would depend on the machine."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# After each step, a line of what is loaded that Equinox had not. With 4 MiB, "auto" would take
# a kernel.
PROGRAM = """
import sys
import equinox as eqx, jax, jax.numpy as jnp
before = set(sys.modules)
def loaded(): print(*sorted(set(sys.modules) - before))

from eqx_norm import BatchNorm, LayerNorm
loaded()

layer, state = eqx.nn.make_with_state(BatchNorm)(4, "batch", approach="batch")
@eqx.filter_jit
@eqx.filter_grad
def gradient(layers, x):
    y, _ = jax.vmap(layers[0], axis_name="batch", in_axes=(0, None), out_axes=0)(x, state)
    return jnp.sum(jax.vmap(layers[1])(y) ** 2)
gradient((layer, LayerNorm(4)), jnp.arange(8.0).reshape(2, 4))
loaded()

from tests.operation.gpu.test_choice import lowered
x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
for implementation in ("xla", "pallas_triton"):
    lowered(jax.vmap(LayerNorm(1024, implementation=implementation)), x)
    loaded()

import eqx_norm
eqx_norm.determinism.monitor  # with no import of its own
loaded()
"""


@pytest.fixture(scope="module")
def loaded():
    """The modules loaded by importing, training, lowering for CUDA twice, and by the probe."""
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return [line.split() for line in run.stdout.splitlines()]


def kernels(names):
    return [name for name in names if any(k in name for k in ("pallas", "mosaic", "triton"))]


def test_importing_loads_this_package_without_kernels_and_probe(loaded):
    imported, *_ = loaded
    assert [name for name in imported if name.split(".")[0] != "eqx_norm"] == []
    assert [name for name in imported if "determinism" in name] == []
    assert kernels(imported) == []
    # 28 when this was written, of half a millisecond each. The kernels would be 100 more.
    assert len(imported) <= 40


def test_training_on_a_cpu_loads_no_kernels(loaded):
    _, trained, *_ = loaded
    assert kernels(trained) == []
    assert [name for name in trained if "eqx_norm.determinism" in name] == []


def test_kernels_are_loaded_where_a_program_takes_one(loaded):
    *_, without, with_one, _ = loaded
    assert kernels(without) == []
    assert "eqx_norm._normalise.gpu.triton_rows" in with_one
    assert "eqx_norm._normalise.gpu.mosaic" not in with_one


def test_the_probe_is_loaded_where_it_is_asked_for(loaded):
    *_, before, after = loaded
    assert "eqx_norm.determinism" not in before
    assert "eqx_norm.determinism" in after
