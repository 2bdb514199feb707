"""Makes nested models, of Equinox's layers or of this package's, and calls them."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from tests.compiling import filter_jit

C = 3


class Counter(eqx.nn.StatefulLayer):
    """Is a stateful layer of a user's own: adds how often it was called."""

    index: eqx.nn.StateIndex

    def __init__(self):
        self.index = eqx.nn.StateIndex(jnp.zeros(()))

    def __call__(self, x, state, *, key=None):
        count = state.get(self.index)
        return x + count.astype(x.dtype), state.set(self.index, count + 1)


class Two(eqx.Module):
    first: Any
    second: Any


class Tied(eqx.Module):
    """Holds one norm that is used twice."""

    shared: eqx.nn.Shared

    def __init__(self, norm):
        pair = Two(norm, norm)
        self.shared = eqx.nn.Shared(pair, lambda two: two.second, lambda two: two.first)


booleans = st.booleans()
batch_norms = st.fixed_dictionaries(
    {
        "mode": st.sampled_from(["batch", "ema"]),
        "channelwise_affine": booleans,
        "momentum": st.sampled_from([0.5, 0.9, 0.99]),
        "eps": st.sampled_from([1e-5, 1e-3]),
        "inference": booleans,
    }
).map(lambda settings: ("BatchNorm", settings))
layer_norms = st.fixed_dictionaries({"use_weight": booleans, "use_bias": booleans}).map(
    lambda settings: ("LayerNorm", settings)
)
others = st.sampled_from(["Linear", "SpectralNorm", "Counter", "relu"]).map(lambda n: (n, {}))
layers = st.one_of(batch_norms, batch_norms, layer_norms, others)
descriptions = st.recursive(
    st.one_of(
        layers,
        batch_norms.map(lambda norm: ("Tied", norm)),
        st.lists(layers, min_size=1, max_size=3).map(lambda some: ("Sequential", some)),
    ),
    lambda parts: st.one_of(
        st.lists(parts, min_size=1, max_size=3),
        st.dictionaries(st.sampled_from("abc"), parts, min_size=1),
        st.tuples(parts, parts).map(lambda two: ("Two", two)),
    ),
    max_leaves=5,
)


def build(description: Any, nn: Any, key: Any) -> Any:
    """Returns the model that is described, with the norms of `nn`."""
    if isinstance(description, list):
        return [
            build(part, nn, jax.random.fold_in(key, i)) for i, part in enumerate(description)
        ]
    if isinstance(description, dict):
        return {name: build(part, nn, key) for name, part in description.items()}
    kind, what = description
    match kind:
        case "BatchNorm":
            norm = nn.BatchNorm(C, "batch", **what)
            return _with_weights(norm, key)
        case "LayerNorm":
            return _with_weights(nn.LayerNorm(C, **what), key)
        case "Linear":
            return eqx.nn.Linear(C, C, key=key)
        case "SpectralNorm":
            return eqx.nn.SpectralNorm(eqx.nn.Linear(C, C, key=key), "weight", key=key)
        case "Counter":
            return Counter()
        case "relu":
            return eqx.nn.Lambda(jax.nn.relu)
        case "Tied":
            return Tied(build(what, nn, key))
        case "Sequential":
            return eqx.nn.Sequential(build(what, nn, key))
        case _:
            return Two(*build(list(what), nn, key))


def _with_weights(norm, key):
    """Returns the norm with a weight and a bias that are not those of every new layer."""
    values = [
        None if old is None else 1 + 0.5 * jax.random.normal(jax.random.fold_in(key, i), (C,))
        for i, old in enumerate((norm.weight, norm.bias))
    ]
    return eqx.tree_at(
        lambda n: (n.weight, n.bias), norm, values, is_leaf=lambda node: node is None
    )


def made(description: Any, nn: Any, members: int = 0) -> Any:
    """Returns model and state; with `members`, those of an ensemble."""

    def make(key):
        return eqx.nn.make_with_state(build)(description, nn, key)

    key = jax.random.key(0)
    return eqx.filter_vmap(make)(jax.random.split(key, members)) if members else make(key)


def apply(model: Any, x: Any, state: Any) -> Any:
    """Returns what the model makes of one example, its parts called one after another."""
    if isinstance(model, list | dict):
        for part in model.values() if isinstance(model, dict) else model:
            x, state = apply(part, x, state)
        return x, state
    if isinstance(model, Tied):
        model = model.shared()
    if isinstance(model, Two):
        return apply(model.second, *apply(model.first, x, state))
    if isinstance(model, eqx.nn.StatefulLayer):
        return model(x, state)  # type: ignore
    return model(x), state


@filter_jit
def call(model: Any, state: Any, x: Any) -> Any:
    """Returns the outputs of a batch, and the state after it; x has the members in front."""

    def of_one(model, state, x):
        mapped = jax.vmap(apply, (None, 0, None), (0, None), axis_name="batch")
        return mapped(model, x, state)

    if x.ndim == 3:
        return eqx.filter_vmap(of_one)(model, state, x)
    return of_one(model, state, x)


def shapes(tree: Any) -> Any:
    """Returns the structure of a pytree, and the shapes and dtypes of its arrays."""

    def described(leaf: Any) -> Any:
        if eqx.is_array(leaf):
            return leaf.shape, leaf.dtype
        return leaf if isinstance(leaf, bool) else type(leaf)

    return jax.tree.structure(tree), list(map(described, jax.tree.leaves(tree)))


def floats64(a: Any) -> np.ndarray:
    return np.asarray(a, np.float64)
