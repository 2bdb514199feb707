"""`monitor`: a value is recorded where it stands, and so is its cotangent."""

from typing import TypeVar

import jax
import jax.numpy as jnp

from ._fingerprint import is_array
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

    **Returns:** `tree`, the same bits. (NumPy's arrays become JAX's.)

    **Raises:** `TypeError` or `ValueError` for a name that is none.
    """
    if not isinstance(name, str):
        raise TypeError(f"monitor(..., name={name!r}): the name is a str, as in 'encoder'.")
    if not name:
        raise ValueError("monitor(..., name=''): give the name that the record is to show.")

    def marked(path: jax.tree_util.KeyPath, leaf: object) -> object:
        if not is_array(leaf):
            return leaf
        inside = jax.tree_util.keystr(path, simple=True, separator=".")
        return probe(jnp.asarray(leaf), f"{name}.{inside}" if path else name)

    return jax.tree_util.tree_map_with_path(marked, tree)
