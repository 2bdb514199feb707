"""Tests that the subset of MNIST begins with the first labels of MNIST."""

from experiments.common import mnist


def test_mnist_images_and_labels():
    cases = (10_000, [5, 0, 4, 1, 9]), (2_000, [7, 2, 1, 0, 4])
    for (images, labels), (count, first) in zip(mnist.load(), cases, strict=True):
        assert (images.shape, labels.shape) == ((count, 28, 28), (count,))
        assert labels[:5].tolist() == first
        scaled = mnist.scaled(images)
        assert (scaled.min(), scaled.max()) == (-1, 1)
