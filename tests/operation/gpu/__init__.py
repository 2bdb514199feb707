"""Tests the kernels for GPUs, on machines that have none."""
