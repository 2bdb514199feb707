"""Makes the indices of a layer that takes the place of another one with other indices."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx


def index(marker: Any) -> eqx.nn.StateIndex[Any]:
    """Returns an index with this marker, and without an initial value.

    A marker is set as `make_with_state` sets it. That function itself cannot be called for a
    model a second time: the first call has taken the initial values out of every other layer
    (`eqx.nn.SpectralNorm`), too.
    """
    made = eqx.nn.delete_init_state(eqx.nn.StateIndex(0))
    object.__setattr__(made, "marker", marker)
    return made


class Renamed:
    """Remembers the new markers of old ones, so that layers which share a state still do.

    A marker that is a string ends in the name of the index, `"Model.norm.batch_counter"`. The
    new one differs in that end only; so it is the one that `make_with_state` would have given
    to the new layer, also where a part of a model is swapped. One that is an object, from
    `eqx.nn.State(model)`, is followed by new objects.
    """

    def __init__(self, fields: Sequence[str]):
        self._fields = fields
        self._known: dict[Any, dict[str, Any]] = {}

    def __call__(self, marker: Any, field: str) -> dict[str, Any]:
        """Returns the new markers by their fields, given the old one in `field`."""
        if marker not in self._known:
            base = marker.removesuffix(f".{field}") if isinstance(marker, str) else None
            self._known[marker] = {
                name: object() if base is None else f"{base}.{name}" for name in self._fields
            }
        return self._known[marker]
