"""Several processes: MNIST under `jax.distributed`, checkpoints, one process killed."""
