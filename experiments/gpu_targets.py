"""Descriptions of GPUs, from which XLA compiles for one that is not there.

XLA reads a GpuTargetConfigProto in text form. What matters to which operations it fuses is
the compute capability, the number of cores and the sizes of shared memory and registers.
"""

import re
from typing import Any

H200 = """
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


def _other(**fields: Any) -> str:
    """The H200's description, with other numbers."""
    target = H200
    for name, value in fields.items():
        target, changes = re.subn(rf"(?m)^(\s*{name}):? .*$", rf"\g<1>{value}", target)
        assert changes == 1, name
    return target


TARGETS = {
    "A100": _other(
        name=': "NVIDIA A100-SXM4-80GB"',
        cuda_compute_capability=" { major: 8 minor: 0 }",
        core_count=": 108",
        fpus_per_core=": 64",
        clock_rate_ghz=": 1.41",
        device_memory_size=": 85899345920",
        memory_bandwidth=": 2039000000000",
        l2_cache_size=": 41943040",
        shared_memory_per_block_optin=": 166912",
        shared_memory_per_core=": 167936",
        device_description_str=': "NVIDIA A100-SXM4-80GB"',
    ),
    "H200": H200,
    "B200": _other(
        name=': "NVIDIA B200"',
        cuda_compute_capability=" { major: 10 minor: 0 feature_extension: "
        "ACCELERATED_FEATURES }",
        core_count=": 148",
        device_memory_size=": 191000000000",
        memory_bandwidth=": 8000000000000",
        l2_cache_size=": 132644864",
        device_description_str=': "NVIDIA B200"',
    ),
}


def shared_memory(device: str) -> int:
    """Of one core, in bytes."""
    (size,) = re.findall(r"shared_memory_per_core: (\d+)", TARGETS[device])
    return int(size)
