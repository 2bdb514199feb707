"""Tests that MNIST's files are read however they are packed, and that errors name the file."""

import gzip
import lzma
import struct

import numpy as np
import pytest

from experiments.common import mnist
from experiments.common.report import UserError

IMAGES, LABELS = mnist.TRAIN


def idx(array) -> bytes:
    array = np.asarray(array, np.uint8)
    return struct.pack(f">I{array.ndim}I", 0x800 + array.ndim, *array.shape) + array.tobytes()


def images(count):
    return np.random.default_rng(count).integers(0, 256, (count, 28, 28))


FIVE, DIGITS = idx(images(5)), idx([3, 1, 4, 1, 9])
BOMB = gzip.compress(FIVE + bytes(10**8))  # 100 KB that unpack to 100 MB
CONTENTS = FIVE, DIGITS, idx(images(2)), idx([0, 7])
FILES = dict(zip(mnist.TRAIN + mnist.TEST, CONTENTS, strict=True))


def test_a_folder_is_read_however_its_files_are_packed(tmp_path):
    packs = ("", bytes), (".gz", gzip.compress), (".xz", lzma.compress), ("", bytes)
    for (name, content), (suffix, pack) in zip(FILES.items(), packs, strict=True):
        (tmp_path / (name + suffix)).write_bytes(pack(content))
    train, test = mnist.load(tmp_path)
    np.testing.assert_array_equal(train.images, images(5))
    np.testing.assert_array_equal(test.images, images(2))
    assert (train.labels.tolist(), test.labels.tolist()) == ([3, 1, 4, 1, 9], [0, 7])


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        (IMAGES, None, "none of them"),
        (IMAGES, FIVE[:-1], "then 3919 bytes"),
        (IMAGES + ".gz", BOMB, "then 3921 bytes"),
        (LABELS, FIVE, "labels, found header 00000803"),
        (LABELS, idx([1, 2, 3, 4]), "5 labels from 0 to 9"),
        (IMAGES + ".gz", gzip.compress(FIVE)[:-20], "a whole file"),
    ],
)
def test_a_wrong_file_is_named(tmp_path, file, content, says):
    for name, right in FILES.items():
        (tmp_path / name).write_bytes(right)
    (tmp_path / file.partition(".")[0]).unlink()
    if content is not None:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(UserError, match=f"^{tmp_path / file}: expected .*{says}"):
        mnist.load(tmp_path)
