"""Defines `recompute_outputs`, a policy for `jax.checkpoint`."""

from eqx_norm._jax.registry import Primitive

# These passes of a norm write vectors, which are saved; the norm's outputs are recomputed.
_VECTORS = "eqx_norm_statistics eqx_norm_moments eqx_norm_dot_products"
_KEPT = frozenset(f"conv_general_dilated dot_general ragged_dot_general {_VECTORS}".split())


def recompute_outputs(primitive: Primitive, *arrays: object, **parameters: object) -> bool:
    """Tells `jax.checkpoint` to save costly results and to recompute the outputs of norms.

    ```python
    @functools.partial(jax.checkpoint, policy=eqx_norm.models.recompute_outputs)
    def loss(model, state, x, labels):
        ...
    ```

    For the backward pass of `conv -> norm -> relu -> conv`, JAX by default saves two arrays:
    the inputs of the norm and of the second convolution. The second array is an elementwise
    function of the first, so this policy recomputes the second array. JAX then saves only the
    results of convolutions and matrix products, and vectors of the norms. The ReLU may be the
    norm's `activation=` or follow the norm, and a residual connection may follow.

    **Arguments:** JAX passes each `primitive` with its `arrays` and `parameters`, which this
    policy ignores.

    **Returns:** `True` for convolutions, matrix products and a norm's statistics, otherwise
    `False`. (With `jax_remat3` JAX consults the policy for matrix products only, and recomputes
    everything else.)
    """
    del arrays, parameters
    return primitive.name in _KEPT
