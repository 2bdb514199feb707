"""`monitor` and `monitor_module` mark values in a program, and change nothing else.

A mark is a primitive of JAX that returns its operand: an equation of the traced program, whose
derivative is a mark on the tangent, and the transpose of that a mark on the cotangent.
`recorded` looks for these equations; without it they vanish in compilation.

This file and `_rules` use JAX's interface for primitives and for reading programs
(`jax.extend.core`, `jax.interpreters`, the parameters of equations), which may change. Checked
with jax 0.10.2 and 0.12.0.1, by tests/determinism/test_transformations.py.
"""

import functools
from typing import Any, TypeVar, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, partial_eval
from jaxtyping import Array

from ._fingerprint import is_array, is_numpy
from ._record import Kind

Tree = TypeVar("Tree")


def monitor(tree: Tree, name: str) -> Tree:
    """Returns `tree` as it is; where the program is `recorded`, its fingerprint is taken.

    ```python
    def loss(model, x):
        h = monitor(model.encoder(x), "encoder")
        return jnp.mean(model.head(h) ** 2)
    ```

    Each array gets a row in the record: `encoder` for an array, `encoder.0` and `encoder.mean`
    for those of a tree. So do its tangent (forward mode) and its cotangent (reverse mode), as
    rows of another kind. Without `recorded` or `recorded_into` the probes vanish when the
    program is compiled, and may stay.

    It may stand under `jit`, `grad`, `jvp`, custom derivative rules, and

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

    **Returns:** `tree`, the same values. NumPy's arrays become JAX's.

    **Raises:** `TypeError` for a name that is no str, `ValueError` for an empty one, and for a
    NumPy array of 64 bits whose values JAX would round, as it does without `jax_enable_x64`.
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
        x = _unrounded(leaf, inside) if is_numpy(leaf) else leaf
        return PROBE.bind(x, name=inside, kind="forward", order=tuple(range(x.ndim)))

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


# --- The primitive.

PROBE = Primitive("eqx_norm_probe")


def _jvp(primals: Any, tangents: Any, *, kind: Kind, **rest: Any) -> Any:
    """Marks the tangent too. Transposed, that mark is one on the cotangent."""
    (x,), (tangent,) = primals, tangents
    if kind == "done":
        raise ValueError(
            "recorded(...) stands inside a derivative (jax.grad, jax.jvp, ...), where it would "
            f"miss the cotangent of {rest['name']!r}. Put it around the whole step: "
            "jax.jit(recorded(step)), where step takes the gradient."
        )
    y = PROBE.bind(x, kind=kind, **rest)
    if isinstance(tangent, ad.Zero) or kind == "cotangent":
        return y, tangent
    kind = "recomputed" if kind == "recomputed" else "tangent"
    return y, PROBE.bind(tangent, kind=kind, **rest)


def _transpose(cotangent: Any, x: Any, *, kind: Kind, **rest: Any) -> list[Any]:
    del x, kind
    if isinstance(cotangent, ad.Zero):
        return [cotangent]
    return [PROBE.bind(cotangent, kind="cotangent", **rest)]


def _batch(arrays: Any, axes: Any, *, order: tuple[int, ...], **rest: Any) -> Any:
    """Marks the whole batch as one value, whose `order` has the batch axis in front."""
    (x,), (batch,) = arrays, axes
    order = (batch, *(axis + (axis >= batch) for axis in order))
    return PROBE.bind(x, order=order, **rest), batch


def _partial_eval(saveable: Any, unknown: Any, instantiated: Any, equation: Any) -> Any:
    """Returns the mark that `remat` has in the first pass, and in the second; whether the
    result is unknown in the first, whether the second has it, and what is saved for that."""
    del saveable  # a mark costs nothing, whatever the policy says
    if unknown[0]:
        return None, equation, [True], [True], []
    again = equation.replace(params={**equation.params, "kind": "recomputed"})
    return equation, again, [False], [True], [] if instantiated[0] else [*equation.invars]


PROBE.def_impl(lambda x, **_: x)
PROBE.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(PROBE, lambda context, x, **_: [x])
ad.primitive_jvps[PROBE] = _jvp
ad.primitive_transposes[PROBE] = _transpose
batching.primitive_batchers[PROBE] = _batch
partial_eval.partial_eval_jaxpr_custom_rules[PROBE] = _partial_eval


# --- All layers of a model.

# The modules inside of these are parts of them: an activation, or a strategy's memory.
_WHOLE = (eqx.nn.BatchNorm, eqx.nn.LayerNorm)

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
    after theirs, and so has the model if it is given a name. A model that is a single layer
    goes by the name of its class if it is given none: `Linear`. An `eqx.nn.State` that a layer
    returns is left out.

    Each layer becomes an instance of a subclass, with its fields and its leaves. So
    `isinstance`, attributes, `eqx.tree_at`, `eqx.filter`, `eqx.nn.inference_mode` and
    serialisation work on the result as on the model (`type(layer) is eqx.nn.Linear` does not),
    and a file written from one can be read into the other. Used inside the loss as above, it
    does not change the model that is trained.

    It does not see functions (but `jax.nn.relu` in an `eqx.nn.Lambda`), methods other than
    `__call__`, and the inside of a `BatchNorm` or `LayerNorm`.

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
        if not is_inner(node):
            return node
        inside = jax.tree_util.keystr(path, simple=True, separator=".")
        return _monitor_layers(node, f"{name}.{inside}" if name else inside)

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
    original, meta = cast(Any, layer).__call__, cast(Any, type(layer))

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _monitor_output(original(self, *args, **kwargs), getattr(self, _NAME))

    fields = {
        "__module__": layer.__module__,
        "__qualname__": f"Monitored{layer.__qualname__}",
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
