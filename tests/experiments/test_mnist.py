"""Tests that the subset of MNIST begins as MNIST does."""

import pytest

from experiments.common import mnist

SPLITS = mnist.load()


@pytest.mark.parametrize(
    ("split", "count", "labels"),
    [(SPLITS.train, 10_000, [5, 0, 4, 1, 9]), (SPLITS.test, 2_000, [7, 2, 1, 0, 4])],
)
def test_images_and_labels(split, count, labels):
    assert split.images.shape == (count, 28, 28)
    assert split.labels.shape == (count,)
    assert split.labels[:5].tolist() == labels
    images = mnist.scaled(split.images)
    assert (images.min(), images.max()) == (-1, 1)
