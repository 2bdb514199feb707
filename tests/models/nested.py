"""Builds models of Equinox's norms or of this package's, and calls them."""

from typing import Any

import equinox as eqx
import jax

import eqx_norm
from tests.compiling import filter_jit

C, KEY = 3, jax.random.key(0)
THEIRS: Any = eqx.nn
OURS: Any = eqx_norm


def norm(nn: Any, key: Any = None, mode: Any = "batch", momentum: float = 0.9) -> Any:
    return nn.BatchNorm(C, "batch", mode=mode, momentum=momentum)


def made(build: Any, nn: Any, *args: Any, members: int = 0) -> tuple[Any, Any]:
    """Returns model and state; with `members`, those of an ensemble."""

    def make(key):
        return eqx.nn.make_with_state(build)(nn, key, *args)

    if members:
        return filter_jit(eqx.filter_vmap(make))(jax.random.split(KEY, members))
    return filter_jit(make)(KEY)


def apply(model: Any, x: Any, state: Any) -> Any:
    """Returns the model's output for one example, with its parts called in order."""
    match model:
        case list() | dict():
            for part in model.values() if isinstance(model, dict) else model:
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


def donatable(tree: Any) -> bool:
    """Returns whether `jax.jit` can be given the pytree for good: no array is in two leaves.

    https://github.com/liesel-devs/liesel/issues/272
    """
    buffers = [a.unsafe_buffer_pointer() for a in jax.tree.leaves(tree) if eqx.is_array(a)]
    return len(set(buffers)) == len(buffers)


def shapes(tree: Any) -> Any:
    """Returns the structure of a pytree, and the shapes and dtypes of its arrays."""

    def described(leaf: Any) -> Any:
        if eqx.is_array(leaf):
            return leaf.shape, leaf.dtype
        return leaf if isinstance(leaf, bool) else type(leaf)

    return jax.tree.structure(tree), list(map(described, jax.tree.leaves(tree)))
