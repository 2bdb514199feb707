"""Has XLA compile for a GPU that is not there, by its description.

XLA reads a GpuTargetConfigProto in text form. What matters to which operations it fuses is
the compute capability, the number of cores and the sizes of shared memory and registers.
"""

import contextlib
import os
import string
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.experimental import topologies

# Gives the optimised HLO of a function, for arguments of such shapes and dtypes.
Compile = Callable[..., str]

_GPUS: dict[str, dict[str, Any]] = {
    "A100": {
        "name": "NVIDIA A100-SXM4-80GB",
        "capability": "major: 8 minor: 0",
        "cores": 108,
        "lanes": 64,
        "clock": 1.41,
        "memory": 85899345920,
        "bandwidth": 2039000000000,
        "cache": 41943040,
        "shared_by_one": 166912,
        "shared": 167936,
    },
    "H200": {
        "name": "NVIDIA H200",
        "capability": "major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES",
        "cores": 132,
        "lanes": 128,
        "clock": 1.98,
        "memory": 151397597184,
        "bandwidth": 4800000000000,
        "cache": 52428800,
        "shared_by_one": 232448,
        "shared": 233472,
    },
}
_GPUS["B200"] = {
    **_GPUS["H200"],
    "name": "NVIDIA B200",
    "capability": "major: 10 minor: 0 feature_extension: ACCELERATED_FEATURES",
    "cores": 148,
    "memory": 191000000000,
    "bandwidth": 8000000000000,
    "cache": 132644864,
}
DEVICES = tuple(_GPUS)

_TARGET = string.Template("""
gpu_device_info {
  name: "$name"
  device_vendor: "NVIDIA Corporation"
  cuda_compute_capability { $capability }
  core_count: $cores
  fpus_per_core: $lanes
  clock_rate_ghz: $clock
  device_address_bits: 64
  device_memory_size: $memory
  memory_bandwidth: $bandwidth
  l2_cache_size: $cache
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: $shared_by_one
  shared_memory_per_core: $shared
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  driver_version: "13.0.0"
  runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.10.0"
}
dnn_version_info { major: 9 minor: 10 }
platform_name: "CUDA"
device_description_str: "$name"
""")


def shared_memory(device: str) -> int:
    """Returns how many bytes of shared memory one core has."""
    return _GPUS[device]["shared"]


def mesh(device: str, count: int = 1) -> jax.sharding.Mesh:
    """Returns a mesh of so many of one of `DEVICES`, on one host, whose axis is "devices"."""
    # With the plugin installed jax would look for a GPU, and fail where there is no driver.
    jax.config.update("jax_platforms", "cpu")
    target = _TARGET.substitute(_GPUS[device])
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target, topology=f"{count}x1x1"
    )
    automatic = (jax.sharding.AxisType.Auto,)
    return jax.sharding.Mesh(topology.devices, ("devices",), axis_types=automatic)


def compiler(device: str) -> Compile:
    """Returns `compile(f, *arguments)`: the optimised HLO of `f` for one of `DEVICES`.

    Of the arguments, only shapes and dtypes matter.
    """
    one = mesh(device)
    on_it = jax.sharding.NamedSharding(one, jax.sharding.PartitionSpec())

    def compile_(f: Callable[..., Any], *arguments: Any) -> str:
        described = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=on_it), arguments
        )
        return compiled(one, f, *described)

    return compile_


def compiled(over: jax.sharding.Mesh, f: Callable[..., Any], *described: Any) -> str:
    """Returns the optimised HLO of `f` for arguments of which it is said where they lie."""
    return built(over, f, *described).as_text() or ""


def built(over: jax.sharding.Mesh, f: Callable[..., Any], *described: Any) -> Any:
    """Returns the program, as `jax.jit(f).lower(...).compile()` does."""
    with jax.sharding.use_abstract_mesh(over.abstract_mesh), _quiet():
        lowered = jax.jit(f).lower(*described)
        # Choosing among algorithms for a convolution means timing them on a GPU.
        return lowered.compile(compiler_options={"xla_gpu_autotune_level": "0"})


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences jax, which deprecates Triton's backend, and jaxlib.

    jaxlib calls a disassembler for Mosaic's kernels, and complains at length on stderr that
    there is none.
    """
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "wb") as nowhere, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton backend", DeprecationWarning)
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
