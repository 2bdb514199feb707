"""Tests the kernels for TPUs, on machines that have none."""
