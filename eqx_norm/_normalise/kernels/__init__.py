"""Provides Pallas kernels, which `implementation="pallas"` asks for: norms of rows, and the
statistics of columns."""
