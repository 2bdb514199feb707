"""Has XLA compile for a GPU that is not there, by its description.

XLA reads a GpuTargetConfigProto in text form. What matters to which operations it fuses is
the compute capability, the number of cores and the sizes of shared memory and registers.
"""

import contextlib
import importlib.util
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.experimental import topologies

from experiments.lab.errors import UserError

# Gives the optimised HLO of a function, for arguments of such shapes and dtypes.
Compile = Callable[..., str]
# Packages whose versions decide what is compiled, and which nobody imports.
PLUGIN = ("jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12")

_H200 = """
gpu_device_info {
  name: "NVIDIA H200"
  device_vendor: "NVIDIA Corporation"
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  device_address_bits: 64
  device_memory_size: 151397597184
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
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
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  driver_version: "13.0.0"
  runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.10.0"
}
dnn_version_info { major: 9 minor: 10 }
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
"""


def _other(**fields: str) -> str:
    """Returns the H200's description with other values."""
    target = _H200
    for name, value in fields.items():
        target, changes = re.subn(rf"(?m)^(\s*{name}:?) .*$", rf"\g<1> {value}", target)
        assert changes == 1, name
    return target


_TARGETS = {
    "A100": _other(
        name='"NVIDIA A100-SXM4-80GB"',
        cuda_compute_capability="{ major: 8 minor: 0 }",
        core_count="108",
        fpus_per_core="64",
        clock_rate_ghz="1.41",
        device_memory_size="85899345920",
        memory_bandwidth="2039000000000",
        l2_cache_size="41943040",
        shared_memory_per_block_optin="166912",
        shared_memory_per_core="167936",
        device_description_str='"NVIDIA A100-SXM4-80GB"',
    ),
    "H200": _H200,
    "B200": _other(
        name='"NVIDIA B200"',
        cuda_compute_capability="{ major: 10 minor: 0 "
        "feature_extension: ACCELERATED_FEATURES }",
        core_count="148",
        device_memory_size="191000000000",
        memory_bandwidth="8000000000000",
        l2_cache_size="132644864",
        device_description_str='"NVIDIA B200"',
    ),
}
DEVICES = tuple(_TARGETS)


def shared_memory(device: str) -> int:
    """Returns how many bytes of shared memory one core has."""
    (size,) = re.findall(r"shared_memory_per_core: (\d+)", _TARGETS[device])
    return int(size)


def require_plugin() -> None:
    """**Raises:** `UserError` where this compiler is not installed."""
    if importlib.util.find_spec("jax_cuda12_plugin") is None:
        raise UserError(
            "To compile for a GPU takes jax's CUDA plugin, which is not installed here: "
            "make gpu-compile-check sets up an environment that has it (no GPU needed)."
        )


def compiler(device: str) -> Compile:
    """Returns `compile(f, *arguments)`: the optimised HLO of `f` for one of `DEVICES`.

    Of the arguments, only shapes and dtypes matter.
    """
    # With the plugin installed jax would look for a GPU, and fail where there is no driver.
    jax.config.update("jax_platforms", "cpu")
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=_TARGETS[device], topology="1x1x1"
    )
    mesh = jax.sharding.Mesh(
        topology.devices, ("device",), axis_types=(jax.sharding.AxisType.Auto,)
    )
    on_it = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def compile_(f: Callable[..., Any], *arguments: Any) -> str:
        described = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=on_it), arguments
        )
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), _quiet():
            lowered = jax.jit(f).lower(*described)
            # Choosing among algorithms for a convolution means timing them on a GPU.
            compiled = lowered.compile(compiler_options={"xla_gpu_autotune_level": "0"})
        return compiled.as_text() or ""

    return compile_


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences jax, which deprecates Triton's backend, and jaxlib.

    jaxlib calls a disassembler for Mosaic's kernels, and complains at length that there is
    none: what is written to stderr is shown only if there is an exception.
    """
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as written, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton backend", DeprecationWarning)
        os.dup2(written.fileno(), 2)
        try:
            yield
        except BaseException:
            written.seek(0)
            os.write(kept, written.read())
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)
