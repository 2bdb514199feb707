"""The experiments' data: read from every source alike, and every fault named with its fix."""

import gzip
import hashlib
import lzma
import shutil
import struct
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest

from experiments.lab import mnist, subset

NAMES = (*mnist.TRAIN, *mnist.TEST)
TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS = NAMES
PUBLISHED = Path(__file__).parents[3] / "shared" / "data" / "mnist"
PACKS = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}


def idx_images(count: int, size: tuple[int, int] = (28, 28)) -> bytes:
    pixels = np.random.default_rng(count).integers(0, 256, (count, *size), np.uint8)
    return struct.pack(">IIII", 0x803, count, *size) + pixels.tobytes()


def idx_labels(*labels: int) -> bytes:
    return struct.pack(">II", 0x801, len(labels)) + bytes(labels)


IMAGES, LABELS = idx_images(5), idx_labels(3, 1, 4, 1, 9)
TINY: dict[str, bytes] = {
    **{TRAIN_IMAGES: IMAGES, TRAIN_LABELS: LABELS},
    **{TEST_IMAGES: idx_images(2), TEST_LABELS: idx_labels(0, 7)},
}


def write(folder: Path, suffix: str, files: dict[str, bytes] = TINY) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / (name + suffix)).write_bytes(PACKS[suffix](content))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def assert_tiny(data: mnist.Mnist) -> None:
    assert [split.images.shape for split in data] == [(5, 28, 28), (2, 28, 28)]
    assert data.train.images.tobytes() == TINY[TRAIN_IMAGES][16:]
    assert data.train.labels.tolist() == [3, 1, 4, 1, 9]
    assert data.test.images.tobytes() == TINY[TEST_IMAGES][16:]
    assert data.test.labels.tolist() == [0, 7]
    assert {array.dtype for split in data for array in split} == {np.dtype(np.uint8)}


def fault(source: object) -> str:
    """Returns what is said of a source that cannot be read."""
    with pytest.raises(mnist.DataError) as caught:
        mnist.load(str(source))
    return str(caught.value)


# --- A folder.


@pytest.mark.parametrize("suffix", PACKS)
def test_folder(tmp_path, suffix):
    assert_tiny(mnist.load(str(write(tmp_path, suffix))))


def test_plain_file_goes_before_packed_one(tmp_path):
    write(tmp_path, "")
    for suffix in (".gz", ".xz"):
        (tmp_path / (TRAIN_IMAGES + suffix)).write_bytes(b"not read")
    assert_tiny(mnist.load(str(tmp_path)))


BROKEN = "file, found a broken one"


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        (TRAIN_IMAGES, None, "none of them"),
        (TRAIN_IMAGES, b"", "header of 16 bytes, found 0 bytes"),
        (TRAIN_IMAGES, IMAGES[:11], "found 11 bytes"),
        (TRAIN_IMAGES, IMAGES[:-1], "3936 bytes for 5 items"),
        (TRAIN_IMAGES, IMAGES + b"!", "found 3937 bytes"),
        (TRAIN_LABELS, LABELS[:-1], "13 bytes for 5 items"),
        (TRAIN_LABELS, IMAGES, "magic number 0x00000801, found 0x00000803"),
        (TRAIN_IMAGES, idx_images(5, (28, 32)), "size (28, 28), found (28, 32)"),
        (TRAIN_IMAGES, idx_images(0), "one image or more, found none"),
        (TEST_LABELS, idx_labels(), "one label or more, found none"),
        (TRAIN_LABELS, idx_labels(1, 2, 3, 4), f"{TRAIN_IMAGES}, found 4"),
        (TEST_LABELS, idx_labels(9, 10), "labels from 0 to 9, found 10 at index 1"),
        (TRAIN_IMAGES + ".gz", gzip.compress(IMAGES)[:-20], f"a whole .gz {BROKEN}"),
        (TRAIN_IMAGES + ".gz", b"<html>", f"a whole .gz {BROKEN}"),
        (TRAIN_IMAGES + ".xz", lzma.compress(IMAGES)[:-20], f"a whole .xz {BROKEN}"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_fault_in_folder(tmp_path, file, content, says):
    write(tmp_path, "")
    (tmp_path / file.removesuffix(".gz").removesuffix(".xz")).unlink()
    if content is not None:
        (tmp_path / file).write_bytes(content)
    message = fault(tmp_path)
    assert message.startswith(f"{tmp_path / file}: expected ")
    assert says in message
    assert message.endswith("; give --data download for the published files")


@pytest.mark.parametrize("suffix", PACKS)
def test_files_that_are_too_large_are_not_read_whole(tmp_path, suffix):
    packer = {".gz": zlib.compressobj(1, wbits=31), ".xz": lzma.LZMACompressor(preset=0)}
    with (write(tmp_path, suffix) / (TEST_LABELS + suffix)).open("wb") as file:
        if suffix:
            for _ in range(256):  # MiB of zeros, in less than a thousandth of that
                file.write(packer[suffix].compress(bytes(2**20)))
            file.write(packer[suffix].flush())
        else:
            file.truncate(2**40)  # with holes
    tracemalloc.start()
    assert "expected 47040016 bytes at most" in fault(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 4 * mnist.LARGEST
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("source", "says"), [("nowhere", "found no such folder"), ("file", "can be read, found")]
)
def test_what_is_no_folder_is_named_in_full(tmp_path, monkeypatch, source, says):
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    message = fault(source)
    assert message.startswith(str(tmp_path / source / TRAIN_IMAGES))
    assert says in message
    assert "--data download" in message


# --- The download.


@pytest.fixture
def mirrors(tmp_path, monkeypatch):
    """Returns two mirrors, of which only the second has the files; the cache is empty."""
    pair = tmp_path / "first", write(tmp_path / "second", ".gz")
    monkeypatch.setattr(mnist, "MIRRORS", tuple(mirror.as_uri() + "/" for mirror in pair))
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in TINY.items()}
    monkeypatch.setattr(mnist, "SHA256_UNPACKED", digests)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return pair


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache" / "eqx-norm" / "mnist"


@pytest.mark.parametrize("first", ["whole", "empty", "with other files"])
def test_download(cache, mirrors, first):
    if first == "whole":
        mirrors[1].rename(mirrors[0])
    elif first == "with other files":
        write(mirrors[0], ".gz", dict.fromkeys(NAMES, b"other"))
    assert_tiny(mnist.load("download"))
    assert sorted(contents(cache)) == sorted(f"{name}.gz" for name in NAMES)
    for mirror in mirrors:
        shutil.rmtree(mirror, ignore_errors=True)
    assert_tiny(mnist.load("download"))  # from the cache


@pytest.mark.usefixtures("mirrors")
@pytest.mark.parametrize("damaged", [b"", b"not gzip", gzip.compress(b"other")], ids=str)
def test_damaged_cache_is_repaired(cache, damaged):
    mnist.load("download")
    file = cache / f"{TEST_IMAGES}.gz"
    whole = file.read_bytes()
    file.write_bytes(damaged)
    assert_tiny(mnist.load("download"))
    assert file.read_bytes() == whole


@pytest.mark.usefixtures("mirrors")
def test_without_xdg_cache_home(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    mnist.load("download")
    assert (tmp_path / ".cache" / "eqx-norm" / "mnist" / f"{TRAIN_IMAGES}.gz").is_file()


def test_a_download_that_fails_says_why(cache, mirrors):
    _, second = mirrors
    write(second, ".gz", {TRAIN_LABELS: b"other"})
    message = fault("download")
    assert f"{second.as_uri()}/{TRAIN_LABELS}.gz: expected SHA-256 " in message
    assert mnist.SHA256_UNPACKED[TRAIN_LABELS] in message
    assert hashlib.sha256(b"other").hexdigest() in message
    assert not (cache / f"{TRAIN_LABELS}.gz").exists()

    shutil.rmtree(second)
    shutil.rmtree(cache)
    message = fault("download")
    for mirror in mirrors:
        assert f"{mirror.as_uri()}/{TRAIN_IMAGES}.gz: expected the file" in message
    assert "; give --data subset, or --data FOLDER" in message


@pytest.mark.usefixtures("mirrors")
def test_cache_cannot_be_written(tmp_path, cache):
    (tmp_path / "cache").touch()
    message = fault("download")
    assert str(cache / f"{TRAIN_IMAGES}.gz") in message
    assert "XDG_CACHE_HOME" in message


# --- The subset.


def test_subset_is_what_its_readme_says():
    assert [len(split.images) for split in mnist.load()] == [10_000, 2_000]
    readme = (mnist.SUBSET / "README.md").read_text(encoding="utf-8")
    for name in NAMES:
        packed = (mnist.SUBSET / f"{name}.xz").read_bytes()
        digest = hashlib.sha256(lzma.decompress(packed)).hexdigest()
        (line,) = (line for line in readme.splitlines() if line.startswith(f"| {name}.xz |"))
        assert line.endswith(f"| {len(packed):,} | {digest} |")


def test_subset_is_the_beginning_of_mnist():
    if not PUBLISHED.is_dir():
        pytest.skip("needs the published files in ../shared/data/mnist")
    for name, content in subset.subset(mnist.load(str(PUBLISHED))).items():
        assert lzma.decompress((mnist.SUBSET / f"{name}.xz").read_bytes()) == content


def test_damaged_subset(tmp_path, monkeypatch):
    monkeypatch.setattr(mnist, "SUBSET", tmp_path)
    message = fault("subset")
    assert str(tmp_path / TRAIN_IMAGES) in message
    assert "git checkout experiments/data/mnist" in message


def test_rebuild_and_check(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(subset, "TRAIN_COUNT", 3)
    monkeypatch.setattr(subset, "TEST_COUNT", 1)
    out = tmp_path / "out"
    build = ["--data", str(write(tmp_path / "source", ".gz")), "--out", str(out)]
    assert subset.main(build) == 0
    once = contents(out)
    train, test = mnist.load(str(out))
    assert train.labels.tolist() == [3, 1, 4]
    assert train.images.tobytes() == TINY[TRAIN_IMAGES][16 : 16 + 3 * 784]
    assert test.labels.tolist() == [0]
    assert subset.main(build) == 0
    assert contents(out) == once
    capsys.readouterr()
    assert subset.main([*build, "--check"]) == 0
    assert capsys.readouterr().out.count("the same\n") == 4

    (out / f"{TRAIN_IMAGES}.xz").unlink()
    (out / f"{TRAIN_LABELS}.xz").write_bytes(b"broken")
    (out / f"{TEST_IMAGES}.xz").write_bytes(lzma.compress(TINY[TEST_IMAGES]))
    repacked = lzma.compress(lzma.decompress(once[f"{TEST_LABELS}.xz"]), check=lzma.CHECK_CRC32)
    (out / f"{TEST_LABELS}.xz").write_bytes(repacked)
    before = contents(out)
    assert subset.main([*build, "--check"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"{TRAIN_IMAGES}.xz: is missing",
        f"{TRAIN_LABELS}.xz: differs",
        f"{TEST_IMAGES}.xz: differs",
        f"{TEST_LABELS}.xz: holds the same data, packed by another version of xz",
    ]
    assert contents(out) == before


def test_too_few_images(tmp_path, capsys):
    source = str(write(tmp_path / "source", ""))
    with pytest.raises(SystemExit) as caught:
        subset.main(["--data", source, "--out", str(tmp_path / "out")])
    assert caught.value.code == 2
    message = capsys.readouterr().err
    assert f"{TRAIN_IMAGES}: expected at least 10000 images, found 5" in message
    assert "give --data download" in message
    assert not (tmp_path / "out").exists()


def test_scaled():
    found = mnist.scaled(np.arange(256, dtype=np.uint8).reshape(1, 16, 16))
    assert (found.shape, found.dtype) == ((1, 1, 16, 16), np.float32)
    right = (np.arange(256) / 255 - 0.5) / 0.5
    np.testing.assert_allclose(found.ravel(), right, rtol=0, atol=2e-7)
    assert (found.min(), found.max()) == (-1, 1)
