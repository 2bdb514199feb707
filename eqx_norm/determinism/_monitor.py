"""`monitor`: a value is recorded where it stands, and so is its cotangent."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ._fingerprint import is_array, is_numpy
from ._primitive import probe

Tree = TypeVar("Tree")


def monitor(tree: Tree, name: str) -> Tree:
    """Returns `tree` as it is; where the program is `recorded`, its fingerprint is taken.

    ```python
    def loss(model, x):
        h = monitor(model.encoder(x), "encoder")
        return jnp.mean(model.head(h) ** 2)
    ```

    Each array gets a row in the record: `encoder` for an array, `encoder.0` and `encoder.mean`
    for those of a tree. Where a derivative is taken, so do its tangent (forward mode) and its
    cotangent (reverse mode), under the same name and a kind of their own: `encoder` cotangent.
    Nothing is recorded unless the program is run by `recorded` or `recorded_into`; without
    these the probes vanish when it is compiled, and may stay where they are.

    It may stand under `jit`, `vmap`, `grad`, `jvp`, `scan`, `cond`, `remat`, `shard_map` and
    functions with a derivative rule of their own:

    - under `vmap` the batch is one value, with one row;
    - in a `scan` there is a row for each iteration;
    - in a `cond` the branch that is not taken has a row that says so (under `vmap` both are
        taken);
    - what `remat` computes again for a gradient is recorded once;
    - in a `shard_map` the parts on all devices are one value, put together along the first
        axis; where that is how it is sharded, the row is the same on any number of devices.
        (With `check_vma=False` JAX does not tell which values are the same on all devices:
        they, too, are then taken for parts.)

    **Use what it returns.** Derivatives go through it, and JAX drops from them what nothing
    depends on.

    **Arguments:**

    - `tree`: any tree. Arrays of every dtype, keys included, are recorded, the rest is not.
    - `name`: its name in the record. Of a name that occurs more than once in a step, the
        second is told as `again` 2, and so on.

    **Returns:** `tree`, the same values. NumPy's arrays become JAX's.

    **Raises:** `TypeError` or `ValueError` for a name that is none; `ValueError` for a NumPy
    array of 64 bits whose values JAX would round, as it does without `jax_enable_x64`.
    """
    if not isinstance(name, str):
        raise TypeError(f"monitor(..., name={name!r}): the name is a str, as in 'encoder'.")
    if not name:
        raise ValueError("monitor(..., name=''): give the name that the record is to show.")

    def marked(path: jax.tree_util.KeyPath, leaf: Any) -> Any:
        if not is_array(leaf):
            return leaf
        inside = jax.tree_util.keystr(path, simple=True, separator=".")
        inside = f"{name}.{inside}" if path else name
        return probe(_unrounded(leaf, inside) if is_numpy(leaf) else leaf, inside)

    return jax.tree_util.tree_map_with_path(marked, tree)


def _unrounded(x: Any, name: str) -> Array:
    """Returns a NumPy array as one of JAX's that has the same values."""
    array = jnp.asarray(x)
    with np.errstate(all="ignore"):
        back = x.astype(array.dtype).astype(x.dtype)
    if back.tobytes() != x.tobytes():
        raise ValueError(
            f"monitor(...): {name!r} is a NumPy array of {x.dtype}, which JAX makes "
            f"{array.dtype} of, as jax_enable_x64 is off, and its values change by that: the "
            f"record would not be of what was given. Convert it before, x.astype({array.dtype}"
            '), or run with jax.config.update("jax_enable_x64", True).'
        )
    return array
