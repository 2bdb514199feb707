"""Tests eqx-norm: each promise is tested in one place."""
