"""Finds and replaces layers in a model, together with their entries in the state.

Only this file handles the names of a state's entries, the additional axes of an ensemble
(`eqx.filter_vmap`), and layers that share a state.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.core import Tracer
from jaxtyping import ArrayLike, PyTree
from typing_extensions import TypeVar

from eqx_norm._contract import described
from eqx_norm._memory import STACKED, checked_state
from eqx_norm._normalise import upcast

# The norms of `eqx.nn`, and its layers with a product of weight and input.
NORMS = (eqx.nn.BatchNorm, eqx.nn.LayerNorm, eqx.nn.GroupNorm, eqx.nn.RMSNorm)
LINEAR = (eqx.nn.Linear, eqx.nn.Conv, eqx.nn.ConvTranspose)

Model = TypeVar("Model")
# A call without a state has the type's default. (pyright wants one value for every type, so
# `state: State = None` needs an exception.)
State = TypeVar("State", bound=eqx.nn.State | None, default=None)
Kind = type | tuple[type, ...]
Where = Callable[[str, Any], object]
Nodes = dict[str, PyTree]  # of a model, by their paths
Entries = dict[Hashable, PyTree]  # of a state, by the markers of indices
Function = TypeVar("Function", bound=Callable[..., PyTree])


def layers_of(model: PyTree, kind: Kind) -> Nodes:
    """Returns the layers of a kind, however nested, by their paths, such as `layers[1].norm`;
    raises as `check_model` does."""
    check_model(model)
    nodes = jtu.tree_leaves_with_path(model, is_leaf=lambda node: isinstance(node, kind))
    return {path_of(keys): node for keys, node in nodes if isinstance(node, kind)}


def check_model(model: PyTree) -> None:
    """Raises `ValueError` for a state, and for an object that has no parts."""
    if isinstance(model, eqx.nn.State):
        raise ValueError(
            "The model given is an eqx.nn.State, which holds only running statistics. Pass the "
            "model first, and its state after it: (model, state, ...)."
        )
    # JAX warns of an iterator in a pytree.
    if model is None or isinstance(model, Iterator) or jtu.all_leaves([model]):
        raise ValueError(
            f"The model given is {described(model)}, which has no layers. Pass a layer, or a "
            "list, dict or eqx.Module of layers."
        )


def chosen(
    model: PyTree,
    kind: Kind,
    where: Where | None,
    verb: str,
    what: str,
    accepts: Callable[[PyTree], bool] = lambda layer: True,
) -> Nodes:
    """Returns the layers of a kind that `accepts(layer)`, and for which `where(path, layer)` is
    true. If there is none, raises `ValueError`: "nothing to `verb`: the model holds no
    `what`"."""
    check_function(
        "where",
        where,
        "of a layer's path and the layer that returns whether to choose it: where=lambda path, "
        "layer: path == 'layers[1]'",
    )
    layers = {p: layer for p, layer in layers_of(model, kind).items() if accepts(layer)}
    selection = {p: layer for p, layer in layers.items() if where is None or where(p, layer)}
    if not selection:
        paths = listed(path or "the model" for path in layers)
        none = f"where= chose none of {paths}." if layers else f"the model holds no {what}."
        raise ValueError(f"There is nothing to {verb}: {none}")
    return selection


def with_nodes(model: Model, nodes: Nodes) -> Model:
    """Returns the model with other layers or arrays at these paths."""
    return jtu.tree_map_with_path(
        lambda keys, node: nodes.get(path_of(keys), node),
        model,
        is_leaf=lambda keys, _: path_of(keys) in nodes,
        is_leaf_takes_path=True,
    )


def copied(layer: Model, **changed: object) -> Model:
    """Returns the layer with other values in some fields, also static ones. Nothing is checked,
    so the layer may be incomplete, as from `eqx.partition` or in an optimiser state."""
    new = object.__new__(type(layer))
    for field, value in _fields(layer).items():
        object.__setattr__(new, field, changed.get(field, value))
    return new


def with_weight_offset(norm: PyTree, weight_offset: float) -> PyTree:
    """Returns a norm with another `weight_offset`, and a weight that leaves outputs equal."""
    weight = norm.weight
    change = norm.weight_offset - weight_offset
    if weight is not None and change != 0:
        dtype = weight.dtype
        exact = upcast(weight) + change
        weight = exact.astype(dtype)
        if not jnp.issubdtype(dtype, jnp.inexact):
            check_untraced(weight)
            if (upcast(weight) != exact).any():
                raise TypeError(
                    f"the weight for weight_offset={weight_offset} is not in {dtype}: weight + "
                    f"{change}. Convert the weight to floats by eqx.tree_at first."
                )
    return copied(norm, weight=weight, weight_offset=weight_offset)


def is_part(layer: PyTree) -> bool:
    """Returns whether a batch norm has arrays alone, as in a gradient, an optimiser's memory or
    the first part of `eqx.partition`: it lacks the flag `inference`, and has no statistics."""
    return isinstance(layer, eqx.nn.BatchNorm) and layer.inference is None


def replaced(
    model: Model,
    state: State,
    layers: Nodes,
    make: Callable[[PyTree], PyTree],
    carry: Callable[..., tuple[PyTree, ...]],
) -> tuple[Model, State]:
    """Returns the model with `make(layer)` in place of these layers, and a state that fits it;
    `None` for `None`, which is enough for layers without statistics.

    `carry(old, new, *entries)` returns the entries of the new layer, given the entries of the
    old layer, in the order of the layers' fields. Every error names the layer.
    """
    before = checked_entries(model, state, layers)
    after = Entries()
    nodes = Nodes()
    dropped = set[Hashable]()
    for path, old in layers.items():
        with located(path, old):
            new = make(old)
            if state is not None and _indices(old):
                new, changed = _with_carried_entries(old, new, before, carry)
                after |= changed
                dropped |= {index.marker for index in _indices(old).values()}
            elif _indices(new) != _indices(old):
                if state is not None:
                    raise ValueError(
                        "it has no statistics in the state given. Give the model with the "
                        "state that it was made with."
                    )
                raise ValueError(
                    "it has no flag inference, as in a gradient or an optimiser's memory. "
                    "Convert the model, and make this memory anew."
                )
        nodes[path] = new
    model = with_nodes(model, nodes)
    return model, with_entries(model, state, after, dropped)


def _with_carried_entries(
    old: PyTree, new: PyTree, values: Entries, carry: Callable[..., tuple[PyTree, ...]]
) -> tuple[PyTree, Entries]:
    """Returns the new layer with indices made from those of the old one, and its entries."""
    indices = _indices(old)
    for index in indices.values():
        if index.marker not in values:
            raise ValueError(
                f"The state has no entry for this layer ({index.marker!r}): it belongs to "
                "another model. Pass the state that was made, or returned, with this model."
            )
    new = copied(new, **{field: _renamed(indices, field) for field in _indices(new)})
    carried = carry(old, new, *(values[index.marker] for index in indices.values()))
    markers = [index.marker for index in _indices(new).values()]
    return new, dict(zip(markers, carried, strict=True))


def over_members(function: Function, number: ArrayLike) -> Function:
    """Returns the function mapped over the members of an ensemble: over each axis of `number`,
    which has one value for each member, or is a scalar for a single layer."""
    for _ in range(jnp.ndim(number)):
        function = jax.vmap(function)
    return function


def axes_in_front(layer: PyTree) -> int:
    """Returns the number of additional axes of the weight of a norm, linear layer, convolution
    or embedding: 0 unless the layer is stacked, as in an ensemble."""
    is_vector = isinstance(layer, eqx.nn.BatchNorm | eqx.nn.GroupNorm)
    shape = getattr(layer, "shape", (None,) if is_vector else (None, None))
    axes = len(shape) + getattr(layer, "num_spatial_dims", 0)
    weight: PyTree = getattr(layer, "weight", None)
    return max(weight.ndim - axes, 0) if eqx.is_array(weight) else 0


_STACKED_FIX = """Call this function for each member i of stacked=(model, state), or of the \
blocks alone, and stack the results (from_torch loads blocks.0 by names={"": "blocks.0"}):
    member = jax.tree.map(lambda a: a[i] if eqx.is_array(a) else a, stacked)
    stack = lambda *a: jnp.stack(a) if eqx.is_array(a[0]) else a[0]
    stacked = jax.tree.map(stack, *results)"""


def check_single(*layers: PyTree) -> None:
    """Raises `ValueError` for layers of an ensemble."""
    for layer in layers:
        if axes_in_front(layer) > 0:
            raise ValueError(
                f"{type(layer).__name__} is stacked, as in an ensemble or in blocks for "
                f"jax.lax.scan: its weight has the shape {layer.weight.shape}. {_STACKED_FIX}"
            )


def is_traced(*given: PyTree) -> bool:
    """Returns whether an array in these trees is traced, so that its values are unknown."""
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(given))


def check_untraced(*given: PyTree) -> None:
    """Raises `ValueError` inside of `jax.jit`, and if arrays in these trees are traced."""
    # Inside of jit, new arrays and all results computed from arrays are traced, too.
    if is_traced(given, jnp.zeros(())):
        raise ValueError(
            "This function reads the values of arrays, which are unknown while jax.jit, vmap "
            "or grad trace a program. Call it outside of jit, and pass in what it returns."
        )


def check_function(argument: str, function: object, hint: str) -> None:
    """Raises `ValueError` with the hint unless `function` is callable or `None`."""
    if function is not None and not callable(function):
        raise ValueError(
            f"{argument}={described(function)} is not callable. Pass a function {hint}."
        )


def checked_mapping(argument: str, names: object, hint: str) -> Mapping[str, str | None]:
    """Returns a mapping from paths to names; raises `ValueError` with the hint otherwise."""
    if not isinstance(names, Mapping):
        raise ValueError(f"{argument}={described(names)} is no mapping of {hint}")
    for path, name in names.items():
        if not (isinstance(path, str) and isinstance(name, str | None)):
            given = described({path: name})
            raise ValueError(f"{argument}={given} is no mapping of strings: {hint}")
    return names


def checked_entries(model: PyTree, state: eqx.nn.State | None, layers: Nodes) -> Entries:
    """Returns the `entries` of a model's state, `{}` for `None` if these layers need no state.
    Raises `ValueError` if model and state are exchanged, for a missing state, and for a stacked
    state of layers that are not stacked."""
    norms = layers_of(model, eqx.nn.BatchNorm)
    if state is None:
        needing = [p for p, layer in layers.items() if _indices(layer) and not is_part(layer)]
        if needing:
            raise ValueError(
                "The state is missing, with the running statistics of "
                f"{listed(path or 'the model' for path in needing)}. Pass it after the model, "
                "(model, state, ...): model, state = eqx.nn.make_with_state(Model)(...)."
            )
        return {}
    values = entries(state)
    for path, norm in norms.items():
        held = jax.tree.leaves([values.get(i.marker) for i in _indices(norm).values()])
        # The last array of one layer is a vector: two counts, or the variance of Equinox's
        # norm. Without weights, an ensemble cannot be distinguished from a stacked state.
        if held and eqx.is_array(norm.weight) and held[-1].ndim > max(1, norm.weight.ndim):
            with located(path, norm):
                shape = norm.weight.shape
                raise ValueError(f"{STACKED} (The weight, of shape {shape}, is not stacked.)")
    return values


def entries(state: eqx.nn.State) -> Entries:
    """Returns the entries of a state by the markers of its indices; the state stays valid.
    Raises `ValueError` for another object."""
    values, markers = checked_state(state).tree_flatten()
    return dict(zip(markers, values, strict=True))


def with_entries(
    model: PyTree, state: State, changed: Entries, dropped: Collection[Hashable] = ()
) -> State:
    """Returns the state with other or new entries, `None` for `None`.

    The entries are in the order of the model's indices, which is the order of `make_with_state`
    and of checkpoints. Entries without an index come last; those in `dropped` are left out.
    """
    if state is None:
        return state
    values = entries(state) | changed
    indices = layers_of(model, eqx.nn.StateIndex).values()
    indexed = [index.marker for index in indices if index.marker in values]
    others = [marker for marker in values if marker not in dropped]
    order = tuple(dict.fromkeys([*indexed, *others]))
    new = eqx.nn.State.tree_unflatten(order, tuple(values[marker] for marker in order))
    return cast(State, new)


@contextlib.contextmanager
def located(path: str, layer: PyTree) -> Iterator[None]:
    """Prefixes the message of an error with the path of a layer."""
    try:
        yield
    except (TypeError, ValueError, NotImplementedError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{path or type(layer).__name__}: {error}") from error


def listed(items: Iterable[str], separator: str = ", ") -> str:
    """Joins the first ten items, and says how many more there are."""
    items = list(items)
    more = [f"and {len(items) - 10} more"] if len(items) > 10 else []
    return separator.join([*items[:10], *more])


def path_of(keys: jtu.KeyPath) -> str:
    """Returns a key path of JAX as users write it, `layers[1].norm`."""
    return jtu.keystr(keys).removeprefix(".")


def _fields(layer: PyTree) -> dict[str, PyTree]:
    return {field.name: getattr(layer, field.name) for field in dataclasses.fields(layer)}


def _indices(layer: PyTree) -> dict[str, eqx.nn.StateIndex]:
    """Returns a layer's indices into the state by the names of their fields."""
    return {f: i for f, i in _fields(layer).items() if isinstance(i, eqx.nn.StateIndex)}


def _renamed(indices: Mapping[str, eqx.nn.StateIndex], field: str) -> eqx.nn.StateIndex:
    """Returns an index for a field of a new layer, given the indices of the old one.

    A marker that is a string ends with the name of its field, `Model.norm.batch_counter`. Only
    this end is replaced, so the new marker is the marker that `make_with_state` would give.
    Layers with equal markers share a state, and their new markers are equal, too.
    """
    old_field, index = next(iter(indices.items()))
    if isinstance(index.marker, str):
        return copied(index, marker=index.marker.removesuffix(old_field) + field)
    return index if field == old_field else copied(index, marker=(index.marker, field))
