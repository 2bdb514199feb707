"""Provides the Pallas kernels of `implementation="pallas"`: norms of rows, and the statistics
of columns."""
