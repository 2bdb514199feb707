"""Tests the kernels for GPUs and TPUs, on machines that have none."""
