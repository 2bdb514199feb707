"""Tests the operation, `eqx_norm/_normalise`."""
