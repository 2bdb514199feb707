"""Holds the experiments: one script each, run as `python -m experiments.NAME`."""
