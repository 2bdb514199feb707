"""Marks values by `monitor` and `monitor_module`, and records marked values by `recorded`.

Without `recorded`, the marks vanish in compilation.
"""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ._fingerprint import is_array
from ._mark import PROBE
from ._program import Context, Record, evaluate

Tree = TypeVar("Tree")
Output = TypeVar("Output")
Parameters = ParamSpec("Parameters")


def recorded(
    function: Callable[Parameters, Output], *, keep_values: bool = False
) -> Callable[Parameters, tuple[Output, Record]]:
    """Returns a function that calls `function` and also returns a record of its probes.

    ```python
    step = eqx.filter_jit(recorded(train_step))
    with Ledger("a.jsonl") as ledger:
        for i in range(100):
            (model, loss), record = step(model, batch(i))
            ledger.append(i, record)
    ```

    Put `recorded` around the whole step, including its gradient, and inside `jit`: outside of
    `jit` each call compiles again. Compare recorded runs only with each other: their bits may
    differ from other runs, because XLA may be unable to fuse operations across a probe.

    **Arguments:**

    - `function`: any function that `jax.jit` can trace; arguments without arrays are static.
    - `keep_values`: whether the record also has the values of all probes, from which `compare`
        computes the size of differences. Values take much memory: keep them for few steps.

    **Returns:** a function with the same arguments that returns the result and a `Record`.

    **Raises:** while tracing, `NotImplementedError` for a probe in a `while_loop` or in another
    operation with a program inside (such as a Pallas kernel); `ValueError` if `recorded` is
    inside a derivative, and at once for a `function` that is not callable.
    """

    if not callable(function):
        raise ValueError(
            f"recorded({type(function).__name__}): pass the function itself, recorded(step), "
            "not what it returns."
        )

    def with_record(
        *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> tuple[Output, Record]:
        # The function is wrapped, because Equinox warns of a layer behind `jax.vmap`.
        trace: Callable[..., PyTree] = eqx.filter_make_jaxpr(
            lambda *args, **kwargs: function(*args, **kwargs)
        )
        jaxpr, outputs, static = trace(*args, **kwargs)
        arrays = jax.tree.leaves(eqx.filter((args, kwargs), eqx.is_array))
        # The program is compiled as a whole, as the step would be, also without an outer `jit`.
        run = jax.jit(functools.partial(evaluate, jaxpr, Context(keep_values)))
        leaves, record = run(*arrays)
        output = jax.tree.unflatten(jax.tree.structure(outputs), leaves)
        return eqx.combine(output, static), record

    return with_record


def monitor(tree: Tree, name: str) -> Tree:
    """Returns `tree` unchanged; `recorded` takes the fingerprint of each of its arrays.

    ```python
    h = monitor(model.encoder(x), "encoder")
    ```

    Each array gets a row in the record: `encoder` for an array, `encoder.0` or `encoder.mean`
    for arrays of a pytree. Tangents (forward mode) and cotangents (reverse mode) also get rows.
    `monitor` works under `jit`, `grad`, `jvp`, custom derivative rules, and

    - `vmap`: the batch is one value, with one row;
    - `scan`: each iteration has a row;
    - `cond`: the branch not taken has a row without a fingerprint (under `vmap` both are
        taken);
    - `remat`: values that are recomputed for a gradient are recorded once;
    - `shard_map`: the parts on all devices are one value, concatenated along the first axis. If
        the value is sharded along this axis, its row does not depend on the number of devices.
        (With `check_vma=False`, values that are equal on all devices also count as parts.)

    **Use the returned tree:** JAX drops unused values from derivatives.

    **Arguments:**

    - `tree`: any pytree. Arrays of every shape and dtype, including keys, are recorded.
    - `name`: the tree's name in the record. If a step uses the name twice, the second row has
        `again=2`.

    **Returns:** `tree`. NumPy's arrays become JAX's, which without `jax_enable_x64` have at
    most 32 bits a number. The record has the values with which the program computes.

    **Raises:** `ValueError` without a name.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"monitor(..., name={name!r}): pass a name, which the record shows.")

    def marked(path: jax.tree_util.KeyPath, leaf: PyTree) -> PyTree:
        if not is_array(leaf):
            return leaf
        x = jnp.asarray(leaf)
        order = tuple(range(x.ndim))
        return PROBE.bind(x, name=_below(name, path), kind="forward", order=order)

    return jax.tree_util.tree_map_with_path(marked, tree)


def _below(name: str, path: jax.tree_util.KeyPath) -> str:
    """Joins a name and a path in the tree by a dot; either may be empty."""
    below = jax.tree_util.keystr(path, simple=True, separator=".")
    return ".".join(filter(None, [name, below]))


# --- All layers of a model.

# The modules inside of these layers are not layers: they are activations or strategies.
_WHOLE = (eqx.nn.BatchNorm, eqx.nn.LayerNorm, eqx.nn.GroupNorm, eqx.nn.RMSNorm)


def monitor_module(model: Tree, name: str = "") -> Tree:
    """Returns the model with the output of each of its layers monitored.

    ```python
    def loss(model, x):
        return jnp.mean(jax.vmap(monitor_module(model))(x) ** 2)
    ```

    This gives the rows `encoder.conv1`, `blocks.2.norm`, ... and their cotangents. A layer is
    any callable `eqx.Module` in the model. A block of layers has a row after its layers, and so
    has the model if you pass a name; a model that is one layer has the name of its class.
    `monitor_module` ignores an `eqx.nn.State` that a layer returns, functions (except in an
    `eqx.nn.Lambda`), methods other than `__call__`, and the inside of a norm layer.

    Each layer becomes an instance of a subclass with the same fields and leaves.

    **Arguments:**

    - `model`: any pytree with `eqx.Module`s.
    - `name`: an optional prefix of the paths: `monitor_module(encoder, "encoder")`.

    **Returns:** a tree with the same leaves.

    **Raises:** `ValueError` if the model has no layer, and for a name that is no text.
    """
    if not isinstance(name, str):
        raise ValueError(
            f"monitor_module(..., name={name!r}): give a prefix of the paths, text."
        )
    for start in (name, name or type(model).__name__):
        monitored = _monitor_layers(model, start)
        if any(map(_is_monitored, jax.tree.leaves(monitored, is_leaf=_is_monitored))):
            return monitored
    raise ValueError(
        f"monitor_module(...): there is no layer in this {type(model).__name__} (a callable "
        "eqx.Module), so nothing would be recorded. Pass the model that you call, or use "
        "monitor(value, name) on what it computes."
    )


def _is_monitored(node: PyTree) -> bool:
    return hasattr(node, "_monitored_as")


def _monitor_layers(model: Tree, name: str) -> Tree:
    def is_inner(node: PyTree) -> bool:
        return isinstance(node, eqx.Module) and node is not model

    def inner(path: jax.tree_util.KeyPath, node: PyTree) -> PyTree:
        return _monitor_layers(node, _below(name, path)) if is_inner(node) else node

    if not isinstance(model, _WHOLE):
        model = jax.tree_util.tree_map_with_path(inner, model, is_leaf=is_inner)
    is_layer = isinstance(model, eqx.Module) and callable(model)
    if not (is_layer and name) or _is_monitored(model):
        return model
    layer: PyTree = object.__new__(_monitored(type(model)))
    for field, value in vars(model).items():
        object.__setattr__(layer, field, value)
    object.__setattr__(layer, "_monitored_as", name)
    return layer


# `_monitored` is cached, so that equal models give equal pytrees.
@functools.cache
def _monitored(layer: type[Any]) -> type[eqx.Module]:
    class Monitored(layer):
        _monitored_as: str = eqx.field(static=True, default="")

        @functools.wraps(layer.__call__)
        def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
            return _monitor_output(layer.__call__(self, *args, **kwargs), self._monitored_as)

    Monitored.__name__ = f"Monitored{layer.__name__}"
    return Monitored


def _monitor_output(output: PyTree, name: str) -> PyTree:
    """Monitors the output of a layer, except an `eqx.nn.State`."""

    def is_state(node: PyTree) -> bool:
        return isinstance(node, eqx.nn.State)

    if type(output) is tuple and len(output) == 2 and is_state(output[1]):
        return _monitor_output(output[0], name), output[1]  # without `.0` in the name
    states, rest = eqx.partition(output, is_state, is_leaf=is_state)
    return eqx.combine(states, monitor(rest, name), is_leaf=is_state)
