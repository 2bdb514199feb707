"""What PyTorch and Flax give on the cases of `cases`, for machines that have neither."""
