"""Kernels for a TPU: rows, normalised one by one."""
