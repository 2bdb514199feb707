"""Defines `recompute_outputs`, a policy for `jax.checkpoint`."""

from typing import Any

# Of a norm's passes these write vectors, which are kept; its outputs are computed again.
_VECTORS = "eqx_norm_statistics eqx_norm_moments eqx_norm_sums"
_KEPT = frozenset(f"conv_general_dilated dot_general ragged_dot_general {_VECTORS}".split())


def recompute_outputs(primitive: Any, *arrays: Any, **parameters: Any) -> bool:
    """Tells `jax.checkpoint` to keep what is costly, and to compute outputs of norms again.

    ```python
    @functools.partial(jax.checkpoint, policy=eqx_norm.models.recompute_outputs)
    def loss(model, state, x, labels):
        ...
    ```

    For the backward pass of `conv -> norm -> relu -> conv` two arrays are kept without it, the
    norm's input and the second convolution's. The second is an elementwise function of the
    first: with this policy it is computed again, and what is kept is what convolutions and
    matrix products give, and the vectors of norms. It does not matter whether the ReLU is the
    norm's `activation=` or stands behind it, nor whether a sum with a residual connection
    follows.

    **Returns:** whether to keep the result of `primitive`: where it is a convolution, a matrix
    product, or a norm's statistics. (With `jax_remat3` JAX asks for matrix products only, and
    computes everything else again, whatever the policy.)
    """
    del arrays, parameters
    return primitive.name in _KEPT
