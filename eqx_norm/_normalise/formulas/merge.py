"""Merges the moments of all examples along named axes, those of `vmap` and those of a mesh.

Moments are passed as four vectors of one shape: count, mean, m2 and mean_lo. The mean is
`mean + mean_lo`, where mean_lo is the rounding error of mean. `Moments.pooled` has the formula.
"""

from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Inexact

from eqx_norm._jax import collectives
from eqx_norm._jax.collectives import AxisName, Names
from eqx_norm._jax.lowering import varying
from eqx_norm.strategies import Moments, Pair

Vectors = Sequence[Inexact[Array, "..."]]  # count, mean, m2 and mean_lo
# The four vectors as the rows of one array, in the dtype of the mean.
Stacked = Inexact[Array, "4 *devices channels"]
# With this number of devices or more, each device merges a shard of the channels.
_MANY = 9


def merged(moments: Moments, axis_name: AxisName) -> Moments:
    """Returns the moments, without derivatives, of all examples along the named axes."""
    vmapped, mesh = collectives.split_names(axis_name)
    counts = jnp.broadcast_to(moments.known_count, moments.m2.shape)
    vectors = [counts, moments.mean, moments.m2, moments.mean_pair.rest]
    for name in vmapped:
        vectors = _merged_sets([collectives.gathered(vector, name) for vector in vectors])
    counts, mean, m2, mean_lo = merged_over_mesh(vectors, mesh)
    if isinstance(moments.count, jax.Array):
        count = counts[0]
    else:
        # Without a mask the count is known while tracing, and stays a NumPy number.
        count = moments.known_count * collectives.size(axis_name)
    return Moments(count, Pair.of(mean, mean_lo), m2)


def merged_over_mesh(vectors: Vectors, mesh: Names) -> Vectors:
    """Returns the four vectors, merged over the mesh axes of a `shard_map`."""
    for name in mesh:
        vectors = varying(vectors, frozenset([name]))
        vectors = merged_over_devices(vectors, (name,), to="invarying")
    return vectors


def merged_over_devices(
    vectors: Vectors, axes: tuple[Hashable, ...], *, to: str = "varying"
) -> Vectors:
    """Returns the four vectors, merged over mesh axes in the devices' order; `to` is that of
    `jax.lax.all_gather`.

    Each of a few devices fetches the vectors of all other devices and merges all vectors. With
    D devices, at least `_MANY` and at most as many as channels, each device merges a shard of
    the channels for all devices, and sends 2 (D - 1) / D times its vectors, not D - 1 times.
    """
    shape = vectors[0].shape
    local = _stacked([vector.reshape(-1) for vector in vectors])
    devices = lax.axis_size(axes)
    channels = local.shape[1]
    if devices < _MANY or channels < devices:
        of_devices = lax.all_gather(local, axes, axis=1, to=to)  # (4, devices, channels)
        merged = _merged_sets(_unstacked(of_devices))
    else:
        merged = _merged_by_shards(local, axes, devices, to)
    return [vector.reshape(shape) for vector in merged]


def _merged_by_shards(
    local: Stacked, axes: tuple[Hashable, ...], devices: int, to: str
) -> Vectors:
    """Returns the four vectors, of which each device merges a shard of the channels."""
    channels = local.shape[1]
    size = -(-channels // devices)
    padded = jnp.pad(local, [(0, 0), (0, size * devices - channels)])
    shards = padded.reshape(4, devices, size)  # for each device, the shard that it merges
    of_devices = lax.all_to_all(shards, axes, split_axis=1, concat_axis=1)
    shard = _stacked(_merged_sets(_unstacked(of_devices)))
    whole = lax.all_gather(shard, axes, axis=1, tiled=True, to=to)
    return _unstacked(whole[:, :channels])


def _stacked(vectors: Vectors) -> Stacked:
    dtype = vectors[1].dtype
    return jnp.stack([vector.astype(dtype) for vector in vectors])


def _unstacked(stacked: Stacked) -> Vectors:
    count, mean, m2, mean_lo = stacked
    return [count.real, mean, m2.real, mean_lo]


def _merged_sets(vectors: Vectors) -> Vectors:
    """Returns the four vectors, merged along their first axis."""
    count, mean, m2, mean_lo = vectors
    moments = Moments(count, Pair.of(mean, mean_lo), m2).pooled()
    return [jnp.asarray(moments.known_count), moments.mean, moments.m2, moments.mean_pair.rest]
