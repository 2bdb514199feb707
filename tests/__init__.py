"""The tests of eqx-norm: one file for each promise."""
