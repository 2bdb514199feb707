"""XLA's compiler for a GPU that is not there."""

import argparse
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import topologies

Compile = Callable[..., str]


def require_plugin(parser: argparse.ArgumentParser) -> None:
    """Ends the program where there is no such compiler."""
    if importlib.util.find_spec("jax_cuda12_plugin") is None:
        parser.exit(
            2,
            "To compile for a GPU takes jax's CUDA plugin, which is not installed here: "
            "make gpu-compile-check sets up an environment that has it (no GPU needed).\n",
        )


def compiler(target: str) -> Compile:
    """Gives `compile(f, *arguments)`: the optimised HLO of `f`, for a GPU that is not there.

    Of the arguments, only shapes and dtypes matter.
    """
    # With the plugin installed jax would look for a GPU, and fail where there is no driver.
    # Nothing is run here but on the CPU.
    jax.config.update("jax_platforms", "cpu")
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target, topology="1x1x1"
    )
    mesh = jax.sharding.Mesh(
        topology.devices, ("device",), axis_types=(jax.sharding.AxisType.Auto,)
    )
    on_it = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def compile_(f: Callable[..., Any], *arguments: Any) -> str:
        described = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=on_it), arguments
        )
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            lowered = jax.jit(f).lower(*described)
        # Choosing among algorithms for a convolution means timing them, which needs a GPU.
        compiled = lowered.compile(compiler_options={"xla_gpu_autotune_level": "0"})
        return compiled.as_text() or ""

    return compile_
