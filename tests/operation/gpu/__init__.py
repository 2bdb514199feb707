"""Tests the kernel for GPUs, on machines that have none."""
