"""`monitor` and `monitor_module` mark values in a program; `recorded` returns what they were.

Without `recorded` the marks vanish in compilation. `recorded` evaluates the program that JAX is
going to run, with all derivatives and maps. So rows have the order of the program, forward
before backward; no transformation can miss a probe or pass it twice; no callback is needed.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped, UInt32

from ._fingerprint import is_array
from ._program import PROBE, Context, Plan, stage

Tree = TypeVar("Tree")


class Record(eqx.Module):
    """Holds what the probes of one step have seen: 8 bytes a row. For `Ledger.append`.

    It is a tree of arrays, which `jax.jit`, `jax.vmap` and `jax.lax.scan` may return;
    `jax.tree.map(lambda a: a[i], records)` takes out one member or step.
    """

    fingerprints: UInt32[Array | np.ndarray, "*mapped rows 2"]
    values: tuple[Shaped[Array | np.ndarray, "..."], ...]
    plan: Plan = eqx.field(static=True)


def recorded(
    function: Callable[..., Any], *, keep_values: bool = False
) -> Callable[..., tuple[Any, Record]]:
    """Returns `function`, changed to return what its probes have seen as well.

    ```python
    step = eqx.filter_jit(recorded(train_step))
    with Ledger("a.jsonl") as ledger:
        for i in range(100):
            (model, loss), record = step(model, batch(i))
            ledger.append(i, record)
    ```

    It goes around the whole step, including the part that takes the gradient, and inside of
    `jit`, outside of which everything is compiled again at each call. Compare recorded runs
    with recorded runs: XLA may not merge operations where a probe is between them.

    **Arguments:**

    - `function`: takes and returns any trees, and can be traced by `jax.jit`. Arguments that
        are no arrays are static.
    - `keep_values`: whether the record has the values of all probes, from which `compare` tells
        by how much they differ. It takes much memory, and is meant for a few steps.

    **Returns:** a function of the same arguments, which returns the pair of `function`'s result
    and a `Record`.

    **Raises:** on tracing, `NotImplementedError` for a probe in a `while_loop` or inside of an
    operation that has programs of its own in it (a Pallas kernel for example); `ValueError`
    where it stands inside a derivative.
    """

    @functools.wraps(function)
    def with_record(*args: Any, **kwargs: Any) -> tuple[Any, Record]:
        # Not `function` itself: Equinox warns of a layer behind `jax.vmap`.
        traced: Any = eqx.filter_make_jaxpr(lambda *a, **k: function(*a, **k))
        jaxpr, outputs, rest = traced(*args, **kwargs)
        staged = stage(jaxpr, Context(keep_values))
        # As one program, as the parts of a `jit` have no program of their own any more.
        arrays = jax.tree.leaves(eqx.filter((args, kwargs), eqx.is_array))
        results = jax.jit(staged.run)(*arrays)
        output = jax.tree.unflatten(jax.tree.structure(outputs), results.outputs)
        record = Record(jnp.asarray(results.rows), results.values, staged.plan)
        return eqx.combine(output, rest), record

    # Equinox follows it, finds such a layer, and warns.
    del with_record.__wrapped__
    return with_record


def monitor(tree: Tree, name: str) -> Tree:
    """Returns `tree` as it is; where the program is `recorded`, its fingerprint is taken.

    ```python
    h = monitor(model.encoder(x), "encoder")
    ```

    Each array gets a row in the record: `encoder` for an array, `encoder.0` and `encoder.mean`
    for those of a tree. So do its tangent (forward mode) and its cotangent (reverse mode), as
    rows of another kind. It may stand under `jit`, `grad`, `jvp`, custom derivative rules, and

    - `vmap`: the batch is one value, with one row;
    - `scan`: there is a row for each iteration;
    - `cond`: the branch that is not taken has a row that says so (under `vmap` both are taken);
    - `remat`: what is computed again for a gradient is recorded once;
    - `shard_map`: the parts on all devices are one value, put together along the first axis;
        if it is sharded like that, the row is the same on any number of devices. (With
        `check_vma=False`, values that are the same on all devices are taken for parts, too.)

    **Use what it returns:** JAX drops from derivatives what nothing depends on.

    **Arguments:**

    - `tree`: any tree. Arrays of every dtype, keys included, are recorded.
    - `name`: its name in the record. Where it occurs a second time in a step, `again` is 2.

    **Returns:** `tree`, the same values. NumPy's arrays become JAX's, which without
    `jax_enable_x64` rounds those of 64 bits; so the record has what the program computes with.

    **Raises:** `ValueError` without a name.
    """
    if not name or not isinstance(name, str):
        raise ValueError(f"monitor(..., name={name!r}): give the name that the record shows.")

    def marked(path: jax.tree_util.KeyPath, leaf: Any) -> Any:
        if not is_array(leaf):
            return leaf
        inside = ".".join([name, *([_inside(path)] if path else [])])
        x = jnp.asarray(leaf)
        return PROBE.bind(x, name=inside, kind="forward", order=tuple(range(x.ndim)))

    return jax.tree_util.tree_map_with_path(marked, tree)


def _inside(path: jax.tree_util.KeyPath) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


# --- All layers of a model.

# The modules inside of these are parts of them: an activation, or a strategy's memory.
_WHOLE = (eqx.nn.BatchNorm, eqx.nn.LayerNorm, eqx.nn.GroupNorm, eqx.nn.RMSNorm)

# The field that a monitored layer has in addition, out of the way of a layer's own.
_NAME = "_monitored_as"


def monitor_module(model: Tree, name: str = "") -> Tree:
    """Returns the model, with what each of its layers returns monitored.

    ```python
    def loss(model, x):
        return jnp.mean(jax.vmap(monitor_module(model))(x) ** 2)
    ```

    gives the rows `encoder.conv1`, `blocks.2.norm`, ... and their cotangents. A layer is any
    `eqx.Module` that can be called, wherever it is in the model. A block of layers has a row
    after theirs, and so has the model if it is given a name; a model that is a single layer
    goes by the name of its class. Left out are an `eqx.nn.State` that a layer returns,
    functions (but `jax.nn.relu` in an `eqx.nn.Lambda`), methods other than `__call__`, and the
    inside of a norm layer.

    Each layer becomes an instance of a subclass, with its fields and its leaves: all but `type`
    works on the result as on the model. The model that is trained does not change.

    **Arguments:**

    - `model`: any tree with `eqx.Module`s in it.
    - `name`: what the paths start with, if anything: `monitor_module(encoder, "encoder")`.

    **Returns:** the same tree of the same leaves.

    **Raises:** `ValueError` where there is no layer in it: nothing would be recorded.
    """
    for start in (name, name or type(model).__name__):
        monitored = _monitor_layers(model, start)
        if any(map(_is_monitored, jax.tree.leaves(monitored, is_leaf=_is_monitored))):
            return monitored
    raise ValueError(
        f"monitor_module(...): there is no layer in this {type(model).__name__}, no "
        "eqx.Module that can be called, so that nothing would be recorded. Give the model "
        "that is called, or use monitor(value, name) on what it computes."
    )


def _is_monitored(node: Any) -> bool:
    return hasattr(node, _NAME)


def _monitor_layers(model: Tree, name: str) -> Tree:
    def is_inner(node: Any) -> bool:
        return isinstance(node, eqx.Module) and node is not model

    def inner(path: jax.tree_util.KeyPath, node: Any) -> Any:
        below = f"{name}.{_inside(path)}" if name else _inside(path)
        return _monitor_layers(node, below) if is_inner(node) else node

    if not isinstance(model, _WHOLE):
        model = jax.tree_util.tree_map_with_path(inner, model, is_leaf=is_inner)
    is_layer = name and isinstance(model, eqx.Module) and callable(model)
    if not is_layer or _is_monitored(model):
        return model
    layer: Any = object.__new__(_monitored(type(model)))
    for field, value in {**vars(model), _NAME: name}.items():
        object.__setattr__(layer, field, value)
    return layer


# One class for each, so that the trees of two models that are alike are alike.
@functools.cache
def _monitored(layer: type[eqx.Module]) -> type[eqx.Module]:
    original: Any = layer.__call__
    meta: Any = type(layer)

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _monitor_output(original(self, *args, **kwargs), getattr(self, _NAME))

    fields = {
        "__module__": layer.__module__,
        "__doc__": layer.__doc__,
        "__annotations__": {_NAME: str},
        _NAME: eqx.field(static=True, default=""),
        "__call__": call,
    }
    return meta(f"Monitored{layer.__name__}", (layer,), fields)


def _monitor_output(output: Any, name: str) -> Any:
    """Monitors what a layer returns, but for an `eqx.nn.State`."""

    def is_state(node: Any) -> bool:
        return isinstance(node, eqx.nn.State)

    if type(output) is tuple and sum(map(is_state, output)) == len(output) - 1 > 0:
        # An output and its state, as a `StatefulLayer` returns them: no `.0` in the name.
        return tuple(part if is_state(part) else monitor(part, name) for part in output)
    states, rest = eqx.partition(output, is_state, is_leaf=is_state)
    return eqx.combine(states, monitor(rest, name), is_leaf=is_state)
