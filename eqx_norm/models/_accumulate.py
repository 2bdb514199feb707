"""Defines `accumulate` and `update_once`: micro-batches that are remembered as one batch."""

from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from eqx_norm import _contract, _memory
from eqx_norm._batch_norm import BatchNorm
from eqx_norm.strategies import Accumulated, Accumulation, TrainingBatch

from ._carried import each_member, form
from ._layers import entries, found, state_of
from ._reconfigure import Where, located, reset

Model = TypeVar("Model")


def accumulate(
    model: Model, state: eqx.nn.State, where: Where | None = None
) -> tuple[Model, eqx.nn.State]:
    """Returns the model with layers that collect micro-batches until `update_once`.

    Gradients of a batch that does not fit into memory are the sum of those of micro-batches.
    With layers as they are, each of these updates the running statistics. Here they are
    updated once, by the moments of all of them together, as by the whole batch:

    ```python
    model, state = accumulate(model, state)


    @eqx.filter_jit
    def gradient(model, state, xs):  # xs is [micro-batches, examples, ...]
        def micro_batch(carried, x):
            total, state = carried
            gradient, state = eqx.filter_grad(loss, has_aux=True)(model, state, x)
            return (jax.tree.map(jnp.add, total, gradient), state), None

        zero = jax.tree.map(jnp.zeros_like, eqx.filter(model, eqx.is_inexact_array))
        (total, state), _ = jax.lax.scan(micro_batch, (zero, state), xs)
        return total, update_once(model, state)
    ```

    Each micro-batch is normalised as the layer's approach says, with the memory from before
    all of them: with `"batch"` by its own moments. So outputs and gradients are those of
    small batches; what is remembered is that of the large one.

    **Arguments:**

    - `model`, `state`: a model with layers of this package, and its state. Both stay as they
        are, and valid.
    - `where`: as for `reconfigure`: which layers; all `BatchNorm`s unless given.

    **Returns:** a new model, whose layers have the approach `Accumulated(...)` around theirs,
    and its state, with nothing pending. Inference is as before. A model that accumulates
    already is returned as it is; `reconfigure(model, state, approach=...)` ends it.

    **Raises:** `ValueError` where there is no `BatchNorm` of this package.
    """
    norms = found(model, BatchNorm)
    chosen = {path for path, layer in norms.items() if where is None or where(path, layer)}
    if not chosen:
        raise ValueError(
            "No BatchNorm of this package was chosen: there is nothing to accumulate. "
            + (
                f"`where` is false for all that there are: {', '.join(map(repr, norms))}."
                if norms
                else "The model has none; eqx_norm.swap(model, state) makes some of eqx.nn's."
            )
        )

    def settings(path: str, layer: Any) -> dict[str, Any]:
        if path not in chosen or isinstance(layer.approach, Accumulated):
            return {}
        return {"approach": Accumulated(layer.approach)}

    return reset(model, state, settings)


def update_once(model: Any, state: eqx.nn.State) -> eqx.nn.State:
    """Returns the state after all micro-batches that are pending, taken as one batch.

    (See `accumulate`.) Call it after the last micro-batch, inside of `jax.jit` or outside. It
    counts as one batch in `accepted_index`. Where nothing is pending nothing changes. A batch
    whose pooled moments are not finite, or which is too small for an unbiased variance, is not
    remembered, as without micro-batches. (But a micro-batch of which `mask=` leaves a single
    value is no part of a batch with `unbiased=True`.)

    **Arguments:** `model`, `state`: those of `accumulate`, the state after micro-batches.

    **Returns:** the new state, with nothing pending. The old one stays valid.

    **Raises:** `ValueError` where no layer accumulates, and for a state that is not the
    model's.
    """
    norms = found(model, BatchNorm)
    norms = {p: layer for p, layer in norms.items() if isinstance(layer.approach, Accumulated)}
    if not norms:
        raise ValueError(
            "No layer of the model accumulates micro-batches. Begin with "
            "model, state = eqx_norm.accumulate(model, state)."
        )
    held = entries(state)
    new: dict[Any, Any] = {}
    for path, layer in norms.items():
        markers = layer.memory_index.marker, layer.accepted_index.marker
        markers = (*markers, layer.rejected_index.marker)
        with located(path, layer):
            if missing := [marker for marker in markers if marker not in held]:
                raise ValueError(
                    f"the state given holds nothing at {missing[0]!r}: it was made for another "
                    "model. Give the one that was returned with this model."
                )
            if markers[0] not in new:  # shared layers have one state
                values = _updated(layer, *(held[marker] for marker in markers))
                new.update(zip(markers, values, strict=True))
    return state_of(model, held | new)


def _updated(layer: BatchNorm, memory: Any, accepted: Array, rejected: Array) -> Any:
    """Returns the three entries of a layer after its pending micro-batches."""
    _, axes = form(layer.approach, layer.input_size, memory)
    inner: Any = layer.approach
    inner = inner.strategy

    def one(memory: Accumulation, accepted: Array, rejected: Array) -> Any:
        pending = memory.pending
        before = accepted - memory.batches
        batch = TrainingBatch(
            pending.count,
            pending.mean,
            pending.m2,
            pending.mean_rest,
            int(layer.unbiased),
            eps=layer.eps,
            step=before,
        )
        _, learnt = _contract.update(inner, batch, memory.remembered)
        enough, finite = pending.count > batch.ddof, pending.finite
        remembered = jax.tree.map(
            lambda a, b: jnp.where(enough & finite, a, b), learnt, memory.remembered
        )
        after = Accumulation.begun(remembered, pending.mean.shape[0], pending.mean.dtype)
        counted = _memory.counted
        return after, counted(before, enough & finite), counted(rejected, enough & ~finite)

    return each_member(one, axes)(memory, accepted, rejected)
