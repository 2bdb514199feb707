"""What a part of a program is turned into, so that it returns the rows of its probes."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, UInt32

from ._plan import Plan


class Results(NamedTuple):
    """What a part of a program returns, the fingerprints of its rows, and, where they are
    kept, the values of its probes."""

    outputs: tuple[Any, ...]
    rows: UInt32[Array, "rows 2"]
    values: tuple[Array, ...] = ()


class Staged(NamedTuple):
    """Which rows a part of a program gives, and how it is evaluated."""

    plan: Plan
    run: Callable[..., Results]


class Context(NamedTuple):
    """Where in the program we are."""

    keep_values: bool
    recomputing: bool = False  # what is computed for a second time, in the backward pass
    mesh_axes: tuple[tuple[str, int], ...] = ()  # of each `shard_map` around: name and size
    check_vma: bool = True  # whether JAX knows over which of these a value varies

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.mesh_axes)


# `_stage.stage`, which the rules need for the programs inside of an equation.
Stage = Callable[[Any, Context], Staged]


def no_rows() -> UInt32[Array, "0 2"]:
    return jnp.zeros((0, 2), jnp.uint32)
