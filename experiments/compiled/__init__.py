"""Compiles the layers for GPUs: what traffic, registers, spills and atomics they come to."""
