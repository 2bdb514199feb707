"""Tests of the operation: `eqx_norm/_normalise`."""
