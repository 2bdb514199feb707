"""Builds nested models of Equinox's norms or of this package's, and calls them."""

from typing import Any

import equinox as eqx
import jax

import eqx_norm
from tests.compiling import filter_jit

C, KEY = 3, jax.random.key(0)
THEIRS: Any = eqx.nn
OURS: Any = eqx_norm
NORMS = (eqx.nn.BatchNorm, eqx.nn.LayerNorm, eqx.nn.GroupNorm, eqx.nn.RMSNorm)


class Two(eqx.Module):
    first: Any
    second: Any


def network(nn: Any, key: Any) -> Any:
    """Returns a nested model with the norms of `nn`, one of which is used twice."""
    keys = jax.random.split(key)
    twice = nn.BatchNorm(C, "batch", mode="ema", momentum=0.5)
    return {
        "stem": [eqx.nn.Linear(C, C, key=keys[0]), nn.BatchNorm(C, "batch", mode="batch")],
        "body": [
            eqx.nn.SpectralNorm(eqx.nn.Linear(C, C, key=key), "weight", key=key),
            eqx.nn.Shared(Two(twice, twice), lambda two: two.second, lambda two: two.first),
            Two(nn.GroupNorm(1, C), nn.LayerNorm(C, use_bias=False)),
        ],
        "last": nn.BatchNorm(C, "batch", 1e-3, False, 0.9, inference=True, mode="batch"),
        "head": [nn.RMSNorm(C, use_weight=False), eqx.nn.Linear(C, C, key=keys[1])],
    }


def norm(nn: Any, key: Any = None, mode: Any = "batch", momentum: float = 0.9) -> Any:
    return nn.BatchNorm(C, "batch", mode=mode, momentum=momentum)


def made(build: Any, nn: Any, *args: Any, members: int = 0) -> tuple[Any, Any]:
    """Returns model and state; with `members`, those of an ensemble."""

    def make(key):
        return eqx.nn.make_with_state(build)(nn, key, *args)

    return eqx.filter_vmap(make)(jax.random.split(KEY, members)) if members else make(KEY)


def apply(model: Any, x: Any, state: Any) -> Any:
    """Returns the model's output for one example, with its parts called in order."""
    match model:
        case eqx.nn.Shared():
            return apply(model(), x, state)
        case list() | dict() | Two():
            parts = vars(model) if isinstance(model, Two) else model
            for part in parts.values() if isinstance(parts, dict) else parts:
                x, state = apply(part, x, state)
            return x, state
        case eqx.nn.StatefulLayer():
            return model(x, state)  # type: ignore
        case _:
            return model(x), state


def forward(model: Any, state: Any, x: Any) -> Any:
    """Returns outputs of a batch, and the state after the batch; x has the members in front."""

    def of_one(model, state, x):
        mapped = jax.vmap(apply, (None, 0, None), (0, None), axis_name="batch")
        return mapped(model, x, state)

    return (eqx.filter_vmap(of_one) if x.ndim == 3 else of_one)(model, state, x)


call = filter_jit(forward)


def shapes(tree: Any) -> Any:
    """Returns the structure of a pytree, and the shapes and dtypes of its arrays."""

    def described(leaf: Any) -> Any:
        if eqx.is_array(leaf):
            return leaf.shape, leaf.dtype
        return leaf if isinstance(leaf, bool) else type(leaf)

    return jax.tree.structure(tree), list(map(described, jax.tree.leaves(tree)))
