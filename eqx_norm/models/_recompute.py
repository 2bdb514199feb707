"""Defines `recompute_outputs`, a policy for `jax.checkpoint`."""

from typing import Any

from eqx_norm._normalise.jaxprs import CALLS, ELEMENTWISE, called, equations

# What moves values, or makes them of nothing.
_MOVES = """
bitcast_convert_type broadcast_in_dim concatenate convert_element_type dynamic_slice expand_dims
full iota pad platform_index pvary reshape rev select_n slice split squeeze transpose
"""
_RANDOM = """
random_bits random_fold_in random_split random_unwrap random_wrap shift_left
shift_right_arithmetic shift_right_logical threefry2x32
"""
# Of a norm's passes this one writes an array of the size of x; of the others come vectors.
_RECOMPUTED = ELEMENTWISE.union(_MOVES.split(), _RANDOM.split(), ["eqx_norm_affine"])


def recompute_outputs(primitive: Any, *arrays: Any, **parameters: Any) -> bool:
    """Tells `jax.checkpoint` to keep what is costly, and to compute outputs of norms again.

    ```python
    @functools.partial(jax.checkpoint, policy=eqx_norm.recompute_outputs)
    def loss(model, state, x, labels):
        ...
    ```

    For the backward pass of `conv -> norm -> relu -> conv` two arrays are kept without it, the
    norm's input and the second convolution's. The second is an elementwise function of the
    first: with this policy it is computed again, and what is kept is what convolutions, matrix
    products and reductions give. It does not matter whether the ReLU is the norm's
    `activation=` or stands behind it, nor whether a sum with a residual connection follows.

    **Returns:** whether to keep the result of `primitive`: not if it is a normalisation (of
    which vectors are kept, but no outputs), elementwise, a broadcast, a change of shape, or
    random bits.
    """
    del arrays
    if primitive.name in CALLS:  # of an activation, for example
        names = {e.primitive.name for inner in called(parameters) for e in equations(inner)}
        return not names <= _RECOMPUTED
    return primitive.name not in _RECOMPUTED
