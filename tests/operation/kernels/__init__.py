"""Tests the kernels for GPUs and TPUs on machines without either."""
