"""Measures who updates the running statistics of batch norm, when, and by what."""
