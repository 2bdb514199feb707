"""Defines `ghost_batches`, which cuts a batch into the groups that are normalised apart."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp

Batch = TypeVar("Batch")


def ghost_batches(batch: Batch, size: int) -> Batch:
    """Returns the batch, cut along its first axis into groups of `size` in their order.

    Each group is normalised by its own statistics, and all of them are remembered together:

    ```python
    make = eqx.nn.make_with_state(BatchNorm)
    model, state = make(16, "ghost", memory_axis_name="group", approach="batch")

    axes = {"in_axes": (0, None), "out_axes": (0, None)}
    group = jax.vmap(model, axis_name="ghost", **axes)
    y, state = jax.vmap(group, axis_name="group", **axes)(ghost_batches(x, 32), state)
    y = y.reshape(-1, *y.shape[2:])
    ```

    **Arguments:**

    - `batch`: an array `(n, ...)`, or a pytree of such arrays, images and labels for example.
    - `size`: how many examples a group has; it divides n.

    **Returns:** the array, or the pytree of arrays, `(n / size, size, ...)`.

    **Raises:** `ValueError` for a size that does not divide n, with the nearest that do.

    Hoffer, Hubara and Soudry, "Train longer, generalize better",
    https://arxiv.org/abs/1705.08741.
    """

    def cut(array: Any) -> Any:
        n = jnp.shape(array)[0]
        if not 0 < size <= n or n % size:
            divisors = [d for d in range(1, n + 1) if n % d == 0]
            below = [d for d in divisors if d < size][-1:]
            above = [d for d in divisors if d > size][:1]
            raise ValueError(
                f"size={size}: a batch of {n} examples cannot be cut into groups of {size}. "
                f"Sizes near it that can be had: {', '.join(map(str, below + above))}."
            )
        return array.reshape(-1, size, *array.shape[1:])

    return jax.tree.map(cut, batch)
