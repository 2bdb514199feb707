"""Experiments: each file makes one figure or table; run as `python -m experiments.NAME`."""
