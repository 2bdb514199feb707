"""The experiments' data: files are read however they are packed, and a wrong one is named."""

import gzip
import hashlib
import lzma
import struct

import numpy as np
import pytest

from experiments.lab import mnist
from experiments.lab.errors import UserError

NAMES = (*mnist.TRAIN, *mnist.TEST)
IMAGES, LABELS, _, TEST_LABELS = NAMES
PACKS = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}


def idx(array) -> bytes:
    array = np.asarray(array, np.uint8)
    return struct.pack(f">I{array.ndim}I", 0x800 + array.ndim, *array.shape) + array.tobytes()


def images(count, size=(28, 28)):
    return np.random.default_rng(count).integers(0, 256, (count, *size))


FIVE, DIGITS = idx(images(5)), idx([3, 1, 4, 1, 9])
FILES = dict(zip(NAMES, (FIVE, DIGITS, idx(images(2)), idx([0, 7])), strict=True))


@pytest.mark.parametrize("suffix", PACKS)
def test_a_folder(tmp_path, suffix):
    for name, content in FILES.items():
        (tmp_path / (name + suffix)).write_bytes(PACKS[suffix](content))
    train, test = mnist.load(str(tmp_path))
    np.testing.assert_array_equal(train.images, images(5))
    np.testing.assert_array_equal(test.images, images(2))
    assert (train.labels.tolist(), test.labels.tolist()) == ([3, 1, 4, 1, 9], [0, 7])


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        (IMAGES, None, "none of them"),
        (IMAGES, b"", "found 0 bytes"),
        (IMAGES, FIVE[:-1], "found 3935 bytes"),
        (IMAGES, FIVE[: -28 * 28], "found 3152 bytes"),
        (IMAGES, idx(images(5, (28, 32))), "images of (28, 28)"),
        (IMAGES, idx(images(0)), "found 16 bytes"),
        (LABELS, FIVE, "labels, found 3936 bytes that begin with 00000803"),
        (LABELS, idx([1, 2, 3, 4]), "expected 5 labels"),
        (TEST_LABELS, idx([9, 10]), "from 0 to 9"),
        (IMAGES + ".gz", gzip.compress(FIVE)[:-20], "a whole file"),
        (IMAGES + ".gz", b"<html>", "a whole file"),
        (IMAGES + ".xz", lzma.compress(FIVE)[:-20], "a whole file"),
    ],
)
def test_a_wrong_file_is_named(tmp_path, file, content, says):
    for name, right in FILES.items():
        (tmp_path / name).write_bytes(right)
    (tmp_path / file.partition(".")[0]).unlink()
    if content is not None:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(UserError) as caught:
        mnist.load(str(tmp_path))
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / file}: expected ")
    assert says in message


def test_the_subset_is_what_its_readme_says():
    assert [len(split.images) for split in mnist.load()] == [10_000, 2_000]
    readme = (mnist.SUBSET / "README.md").read_text(encoding="utf-8")
    for name in NAMES:
        packed = (mnist.SUBSET / f"{name}.xz").read_bytes()
        digest = hashlib.sha256(lzma.decompress(packed)).hexdigest()
        (line,) = (line for line in readme.splitlines() if line.startswith(f"| {name}.xz |"))
        assert line.endswith(f"| {len(packed):,} | {digest} |")


def test_scaled():
    found = mnist.scaled(np.arange(256, dtype=np.uint8).reshape(1, 16, 16))
    assert (found.shape, found.dtype) == ((1, 1, 16, 16), np.float32)
    right = (np.arange(256) / 255 - 0.5) / 0.5
    np.testing.assert_allclose(found.ravel(), right, rtol=0, atol=2e-7)
    assert (found.min(), found.max()) == (-1, 1)
