"""Holds the formulas in plain JAX: statistics, the norm of a row, activations, layouts."""
