"""Tests the kernel for GPUs, on machines that have none, by the backends that this jax has."""

import jax

from eqx_norm._normalise.gpu import mosaic, triton

HAS_MOSAIC = jax.__version_info__ >= (0, 12)
BACKENDS = {"triton": triton} | ({"mosaic": mosaic} if HAS_MOSAIC else {})
