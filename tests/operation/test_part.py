"""Tests the part of x whose mean is subtracted before x is summed, on a GPU and a TPU."""

import jax.numpy as jnp
import numpy as np
import pytest

from eqx_norm._normalise.variants.part import part_of

# Shape of x, of its moments, the devices that split the first axis, and the shape of the part.
PARTS = [
    ((8192, 8), (1, 8), 1, (512, 8)),
    ((8192, 8), (1, 8), 4, (512, 8)),
    ((40, 8), (1, 8), 4, (4, 8)),
    ((41, 8), (1, 8), 4, (41, 8)),
    ((64, 3, 9, 9), (1, 3, 1, 1), 1, (4, 3, 9, 9)),
    ((64, 3, 9, 9), (1, 3, 1, 1), 4, (4, 3, 9, 9)),
    ((24, 3, 9, 9), (1, 3, 1, 1), 4, (12, 3, 9, 9)),
    ((4, 3, 9, 9), (1, 3, 1, 1), 1, (4, 3, 1, 9)),
    ((4, 768), (4, 1), 4, (4, 64)),
    ((4, 20), (4, 1), 4, (4, 20)),
    ((4, 8, 16, 16), (4, 2, 1, 1), 4, (4, 8, 4, 16)),
    ((4, 8), (4, 2), 4, (4, 8)),  # groups of vectors
    ((2, 3), (2, 3), 1, (2, 3)),  # no sum
    ((0, 8), (1, 8), 1, (0, 8)),
    ((0, 8), (1, 8), 4, (0, 8)),
]


@pytest.mark.parametrize(("shape", "of_moments", "devices", "expected"), PARTS)
def test_a_part_has_a_sixteenth_or_more_of_each_group(shape, of_moments, devices, expected):
    part = part_of(jnp.zeros(shape), of_moments, devices)
    assert part.shape == expected
    assert part.size >= np.prod(shape) / 16


@pytest.mark.parametrize("shape", [(64, 1), (48, 2, 3, 3)])
def test_each_device_has_an_equal_share_of_the_part(shape):
    """Fails if devices would have to send their values."""
    owner = np.arange(shape[0]) // (shape[0] // 4)
    x = jnp.asarray(np.broadcast_to(owner.reshape(-1, *[1] * (len(shape) - 1)), shape), float)
    part = part_of(x, (1, *shape[1:2], *[1] * (len(shape) - 2)), 4)
    values, counts = np.unique(part, return_counts=True)
    np.testing.assert_array_equal(values, range(4))
    assert len({*counts.tolist()}) == 1
