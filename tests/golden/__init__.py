"""Holds what PyTorch and Flax give on `cases`, for machines that have neither."""
