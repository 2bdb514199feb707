"""What the probes of a step have seen."""

import equinox as eqx
from jaxtyping import Array, Shaped, UInt32

from ._plan import Plan


class Record(eqx.Module):
    """What the probes of one step have seen: 8 bytes a row. For `Ledger.append`.

    It is a tree of arrays, so that it may be returned from `jax.jit`, `jax.vmap` and
    `jax.lax.scan` (and be cut into members and steps again: `jax.tree.map(lambda a: a[i],
    records)`).
    """

    fingerprints: UInt32[Array, "*mapped rows 2"]
    values: tuple[Shaped[Array, "..."], ...]
    plan: Plan = eqx.field(static=True)
