"""Defines `ghost_batches`, which cuts a batch into groups to normalise separately."""

from typing import TypeVar

import jax
import jax.numpy as jnp

from eqx_norm import _arguments

Batch = TypeVar("Batch")


def ghost_batches(batch: Batch, size: int) -> Batch:
    """Cuts a batch along its first axis into consecutive groups of `size` examples.

    In this example the layer normalises each group by the group's own statistics, and updates
    its running statistics once, by the statistics of the whole batch:

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
    - `size`: the number of examples in a group, an int; it must divide n.

    **Returns:** the batch, with arrays of shape `(n / size, size, ...)`.

    **Raises:** `ValueError` if `size` does not divide n, or arrays differ in n.

    Hoffer, Hubara and Soudry, "Train longer, generalize better",
    https://arxiv.org/abs/1705.08741.
    """
    lengths = sorted({n for array in jax.tree.leaves(batch) for n in jnp.shape(array)[:1]})
    if len(lengths) != 1 or not all(map(jnp.ndim, jax.tree.leaves(batch))):
        raise ValueError(
            f"batch={jax.tree.map(jnp.shape, batch)} (shapes): every array must have the same "
            "number of examples along its first axis, to be cut into the same groups."
        )
    (n,) = lengths
    size = _arguments.checked_size("size", size)
    if not n or n % size:
        divisors = [d for d in range(1, n + 1) if n % d == 0]
        near = [d for d in divisors if d < size][-1:] + [d for d in divisors if d > size][:1]
        raise ValueError(
            f"size={size!r}: a batch of {n} examples cannot be cut into groups of {size}. "
            f"The nearest sizes that divide it: {', '.join(map(str, near)) or 'none'}."
        )
    return jax.tree.map(lambda array: array.reshape(-1, size, *array.shape[1:]), batch)
