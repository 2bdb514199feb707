"""Finds and replaces layers in a model, together with their entries in the state.

Only this file knows how a state names its entries, that an ensemble (`eqx.filter_vmap`) has
more axes, and that layers may share a state.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from eqx_norm._memory import Remembered

Model = TypeVar("Model")
Kind = type[Any] | tuple[type[Any], ...]
Where = Callable[[str, Any], Any]
# A layer's entries in the state, by the names of its index fields.
Entries = dict[str, Any]
# Maps a function of one member's memory over the members of an ensemble.
OverMembers = Callable[[Callable[..., Any]], Callable[..., Any]]
Carry = Callable[[Any, Any, Entries, OverMembers], Entries]


def layers_of(model: Any, kind: Kind) -> dict[str, Any]:
    """Returns the layers of a kind by their paths, as `layers[1].norm`, however nested."""
    leaves = jtu.tree_leaves_with_path(model, is_leaf=lambda node: isinstance(node, kind))
    return {name(path): leaf for path, leaf in leaves if isinstance(leaf, kind)}


def chosen(layers: dict[str, Any], where: Where | None, verb: str, what: str) -> dict[str, Any]:
    """Returns those of the layers for which `where(path, layer)` is true.

    **Raises:** `ValueError` if there are none: "nothing to `verb`: the model holds no `what`".
    """
    if where is not None and not callable(where):
        raise ValueError(
            f"where={where!r} is not callable. Pass a function of a layer's path and the layer "
            "that returns whether to choose it: where=lambda path, layer: path == 'layers[1]'."
        )
    taken = {p: layer for p, layer in layers.items() if where is None or where(p, layer)}
    if not taken:
        paths = listed(path or "the model" for path in layers)
        none = f"where= chose none of {paths}." if layers else f"the model holds no {what}."
        raise ValueError(f"There is nothing to {verb}: {none}")
    return taken


def mapped(model: Model, kind: Kind, function: Callable[[str, Any], Any]) -> Model:
    """Returns the model with `function(path, layer)` in place of each layer of a kind."""

    def new(path: Any, node: Any) -> Any:
        return function(name(path), node) if isinstance(node, kind) else node

    return jtu.tree_map_with_path(new, model, is_leaf=lambda node: isinstance(node, kind))


def copied(layer: Any, **changed: Any) -> Any:
    """Returns the layer with other values in some fields, static ones too. Nothing is checked,
    so the layer may be a part of one, from `eqx.partition` or an optimiser state."""
    new = object.__new__(type(layer))
    for name, value in _fields(layer).items():
        object.__setattr__(new, name, changed.get(name, value))
    return new


def replaced(
    model: Model,
    state: eqx.nn.State,
    kind: Kind,
    make: Mapping[str, Callable[[Any], Any]],
    carry: Carry,
) -> tuple[Model, eqx.nn.State]:
    """Returns the model with some layers replaced, and the state with the new layers' entries.

    **Arguments:**

    - `make`: functions that make a new layer of an old one of this `kind`, by its path.
    - `carry(old, new, remembered, over)`: returns the new layer's entries, given the old one's;
        called once for layers that share a state. `over(function)` maps the function over the
        members of an ensemble.

    **Raises:** `ValueError` for a state of another model. Every error names the layer.
    """
    before, made = entries(state), dict[Any, Any]()
    known: dict[tuple[Any, ...], dict[str, Any]] = {}  # the new markers, by the old ones

    def one(path: str, old: Any) -> Any:
        if path not in make:
            return old
        with located(path, old):
            new = make[path](old)
            indices, fields = _indices(old), _indices(new).keys()
            remembered, over = remembered_by(old, state)
            key = tuple(index.marker for index in indices.values())
            if key not in known:
                known[key] = _markers(indices, fields)
                values = carry(old, new, remembered, over) if indices else {}
                made.update({known[key][field]: values[field] for field in fields})
        return copied(new, **{field: _index(known[key][field]) for field in fields})

    result = mapped(model, kind, one)
    gone = {marker for key in known for marker in key}
    gone -= {index.marker for index in layers_of(result, eqx.nn.StateIndex).values()}
    kept = {marker: value for marker, value in before.items() if marker not in gone}
    return result, state_of(result, kept | made)


def remembered_by(layer: Any, state: eqx.nn.State) -> tuple[Entries, OverMembers]:
    """Returns a layer's entries in the state, and a map over the members of an ensemble.

    **Raises:** `ValueError` for a state of another model.
    """
    values, indices = entries(state), _indices(layer)
    if lost := [i.marker for i in indices.values() if i.marker not in values]:
        raise ValueError(
            f"The state has no entry for this layer ({lost[0]!r}): it belongs to another "
            "model. Pass the state that was made, or returned, with this model."
        )
    remembered = {field: values[index.marker] for field, index in indices.items()}
    # Equinox's layers count batches in a scalar, this package's in two numbers.
    axes = min((jnp.ndim(leaf) for leaf in jax.tree.leaves(remembered)), default=0)
    if isinstance(memory := remembered.get("memory_index"), Remembered):
        axes = jnp.ndim(memory.accepted)

    def over(function: Callable[..., Any]) -> Callable[..., Any]:
        for _ in range(axes):
            function = jax.vmap(function)
        return function

    return remembered, over


def entries(state: eqx.nn.State) -> dict[Any, Any]:
    """Returns the entries of a state by the markers of its indices; the state stays valid."""
    values, markers = state.tree_flatten()
    return dict(zip(markers, values, strict=True))


def state_of(model: Any, values: Mapping[Any, Any]) -> eqx.nn.State:
    """Returns a state with these entries, in the order of the model's indices, as in
    `make_with_state`; entries without an index come last. Checkpoints have this order."""
    markers = [index.marker for index in layers_of(model, eqx.nn.StateIndex).values()]
    order = dict.fromkeys([*(m for m in markers if m in values), *values])
    return eqx.nn.State.tree_unflatten(tuple(order), tuple(values[m] for m in order))


@contextlib.contextmanager
def located(path: str, layer: Any) -> Iterator[None]:
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


def name(path: Any) -> str:
    """Returns a key path of JAX as users write it, `layers[1].norm`."""
    return jtu.keystr(path).removeprefix(".")


def _fields(layer: Any) -> dict[str, Any]:
    return {field.name: getattr(layer, field.name) for field in dataclasses.fields(layer)}


def _indices(layer: Any) -> dict[str, Any]:
    """Returns the indices into the state by the names of their fields."""
    return {n: i for n, i in _fields(layer).items() if isinstance(i, eqx.nn.StateIndex)}


def _markers(indices: Mapping[str, Any], fields: Iterable[str]) -> dict[str, Any]:
    """Returns the markers of new indices: the old marker if a field of that name had one.

    A marker that is a string ends in the name of its field, `Model.norm.batch_counter`. A new
    one differs only in that end, so it is the one that `make_with_state` would give.
    """
    old = {field: index.marker for field, index in indices.items()}
    names = [m.removesuffix(field) for field, m in old.items() if isinstance(m, str)]
    return {field: names[0] + field if names else object() for field in fields} | {
        field: old[field] for field in fields if field in old
    }


def _index(marker: Any) -> eqx.nn.StateIndex[Any]:
    """Returns an index with this marker, and without an initial value.

    The marker is set as `make_with_state` sets it. That function cannot be called twice for a
    model: the first call deletes the initial values of all layers (`eqx.nn.SpectralNorm`, too).
    """
    made = eqx.nn.delete_init_state(eqx.nn.StateIndex(0))
    object.__setattr__(made, "marker", marker)
    return made
