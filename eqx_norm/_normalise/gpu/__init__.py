"""Holds the operation's kernels for GPUs, written in Pallas.

`choice` decides where a kernel stands in for a pass. `tiling` cuts up the work, `tiles` says
where a program finds its values, and `lanes` keeps moments and sums in its registers. `passes`
computes the two passes that sum over x with either backend, `triton` or `mosaic`;
`triton_rows` normalises whole rows.
"""
