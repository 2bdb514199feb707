"""Tests what `import eqx_norm` offers, how it presents itself, and what it loads."""

import importlib.metadata
import pydoc
import re
import sys

import equinox as eqx
import jax
import pytest

import eqx_norm
from eqx_norm import BatchNorm
from tests.helpers import example, make, normal
from tests.processes import python


def test_dir_is_what_there_is_to_use():
    rooms = {"determinism", "models", "strategies"}
    norms = {f"{kind}Norm" for kind in ("Batch", "Group", "Instance", "Layer", "RMS")}
    assert set(eqx_norm.__all__) == {"ghost_batches"} | norms | rooms
    assert dir(eqx_norm) == sorted([*eqx_norm.__all__, "__version__"])
    assert all(hasattr(eqx_norm, name) for name in dir(eqx_norm))
    assert eqx_norm.__version__ == importlib.metadata.version("eqx-norm")
    with pytest.raises(AttributeError, match="'eqx_norm' has no attribute 'WeightNorm'"):
        eqx_norm.WeightNorm  # type: ignore  # noqa: B018


def test_the_example_in_the_docstring_trains_then_infers():
    names = example(
        BatchNorm, BatchNorm=BatchNorm, eqx=eqx, jax=jax, x=normal(0, (2, 3, 2, 2), 5)
    )
    new, trained, inferred = (
        state.get(names["model"].memory_index)
        for state in (make(3, "batch", approach="batch")[1], names["state"], names["_"])
    )
    assert not eqx.tree_equal(new, trained)
    assert eqx.tree_equal(trained, inferred)


def test_help_shows_the_layers():
    text = pydoc.plain(pydoc.render_doc(eqx_norm))
    fields = {"BatchNorm": "approach", "LayerNorm": "shape", "GroupNorm": "groups"}
    for name, field in fields.items():
        described = re.search(rf"class {name}\(eq.*?(?=\n    class |\Z)", text, re.DOTALL)
        assert described
        assert f"- `{field}`: " in described[0]
    assert eqx_norm.__version__ in text


def test_help_of_batch_norm_is_short():
    """It has 120 lines at most, of which Equinox's methods and signatures take 83."""
    own = BatchNorm, BatchNorm.__init__, BatchNorm.__call__
    assert sum(len(pydoc.getdoc(thing).splitlines()) for thing in own) <= 37
    if sys.version_info < (3, 13):  # from 3.13 on a signature has a line for each argument
        assert len(pydoc.plain(pydoc.render_doc(BatchNorm)).splitlines()) <= 120


# --- What is loaded, counted in modules: a time would depend on the machine.

# After each step, a line of what is loaded that Equinox had not.
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

x = jax.ShapeDtypeStruct((1024, 64), jnp.float32)
for implementation in ("xla", "pallas"):
    layer = BatchNorm(64, "batch", approach="batch", implementation=implementation)
    over_batch = jax.vmap(layer, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    traced = jax.jit(lambda x: over_batch(x, eqx.nn.State(layer))[0]).trace(x)
    traced.lower(lowering_platforms=("cuda",))
    loaded()

import eqx_norm
eqx_norm.determinism.monitor  # with no import of its own
loaded()
"""


def kernels(names):
    return [name for name in names if any(k in name for k in ("pallas", "mosaic", "triton"))]


def test_what_is_loaded_when():
    """A CPU needs no kernels, and nobody the probe before asking for it."""
    lines = [line.split() for line in python("-c", PROGRAM).stdout.splitlines()]
    imported, trained, without_kernel, with_kernel, with_probe = lines
    assert [name for name in imported if name.split(".")[0] != "eqx_norm"] == []
    # 41 when this was written, of half a millisecond each. The kernels would be 100 more.
    assert len(imported) <= 50
    for names in (imported, trained, without_kernel):
        assert kernels(names) == []
        assert "eqx_norm.determinism" not in names
    # By one of the two backends.
    ours = kernels(name for name in with_kernel if name.startswith("eqx_norm._normalise"))
    assert len(ours) == 1
    assert "eqx_norm.determinism" not in with_kernel
    assert "eqx_norm.determinism" in with_probe
