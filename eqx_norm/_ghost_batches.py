"""Defines `ghost_batches`, which cuts a batch into groups to normalise separately."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp

Batch = TypeVar("Batch")


def ghost_batches(batch: Batch, size: int) -> Batch:
    """Cuts a batch along its first axis into consecutive groups of `size` examples.

    In this example the layer normalises each group by the group's own statistics, and updates
    its running statistics once, by those of the whole batch:

    ```python
    make = eqx.nn.make_with_state(BatchNorm)
    model, state = make(16, "ghost", memory_axis_name="group", approach="batch")

    axes = {"in_axes": (0, None), "out_axes": (0, None)}
    group = jax.vmap(model, axis_name="ghost", **axes)
    y, state = jax.vmap(group, axis_name="group", **axes)(ghost_batches(x, 32), state)
    y = y.reshape(-1, *y.shape[2:])
    ```

    **Arguments:**

    - `batch`: an array `(n, ...)` of any dtype, or a pytree of such arrays.
    - `size`: the number of examples in a group; it must divide n.

    **Returns:** the batch, with arrays of shape `(n / size, size, ...)`.

    **Raises:** `ValueError` if `size` does not divide n.

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
                f"The nearest sizes that divide it: {', '.join(map(str, below + above))}."
            )
        return array.reshape(-1, size, *array.shape[1:])

    return jax.tree.map(cut, batch)
