"""The experiments' data: read from every source alike, and every fault named with its fix."""

import gzip
import hashlib
import lzma
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from experiments.lab import mnist
from experiments.lab import subset as make_subset

NAMES = (*mnist.TRAIN, *mnist.TEST)
TRAIN_IMAGES, TRAIN_LABELS = mnist.TRAIN
TEST_IMAGES, TEST_LABELS = mnist.TEST
PUBLISHED = Path(__file__).parents[3] / "shared" / "data" / "mnist"

Pack = Callable[[bytes], bytes]
PACKS: dict[str, Pack] = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}


def idx_images(count: int, size: tuple[int, int] = (28, 28), magic: int = 0x803) -> bytes:
    pixels = np.random.default_rng(count).integers(0, 256, (count, *size), np.uint8)
    return struct.pack(">IIII", magic, count, *size) + pixels.tobytes()


def idx_labels(labels: list[int]) -> bytes:
    return struct.pack(">II", 0x801, len(labels)) + bytes(labels)


TINY = {
    TRAIN_IMAGES: idx_images(5),
    TRAIN_LABELS: idx_labels([3, 1, 4, 1, 9]),
    TEST_IMAGES: idx_images(2),
    TEST_LABELS: idx_labels([0, 7]),
}


def write(folder: Path, suffix: str, files: dict[str, bytes] = TINY) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / (name + suffix)).write_bytes(PACKS[suffix](content))
    return folder


def assert_tiny(data: mnist.Mnist) -> None:
    assert data.train.images.shape == (5, 28, 28)
    assert data.train.images.tobytes() == TINY[TRAIN_IMAGES][16:]
    assert data.train.labels.tolist() == [3, 1, 4, 1, 9]
    assert data.test.images.tobytes() == TINY[TEST_IMAGES][16:]
    assert data.test.labels.tolist() == [0, 7]
    assert {array.dtype for split in data for array in split} == {np.dtype(np.uint8)}


@pytest.mark.parametrize("suffix", PACKS)
def test_folder(tmp_path: Path, suffix: str):
    assert_tiny(mnist.load(str(write(tmp_path, suffix))))


def test_plain_file_goes_before_packed_one(tmp_path: Path):
    write(tmp_path, "")
    for suffix in (".gz", ".xz"):
        (tmp_path / (TRAIN_IMAGES + suffix)).write_bytes(b"not read")
    assert_tiny(mnist.load(str(tmp_path)))


IMAGES, LABELS = TINY[TRAIN_IMAGES], TINY[TRAIN_LABELS]


GZIPPED, BROKEN = gzip.compress(IMAGES), "file, found a broken one"


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
        (TEST_LABELS, idx_labels([]), "one label or more, found none"),
        (TRAIN_LABELS, idx_labels([1, 2, 3, 4]), f"{TRAIN_IMAGES}, found 4"),
        (TEST_LABELS, idx_labels([9, 10]), "labels from 0 to 9, found 10 at index 1"),
        (TRAIN_IMAGES + ".gz", GZIPPED[:-20], f"a whole .gz {BROKEN}"),
        (TRAIN_IMAGES + ".gz", b"<html>", f"a whole .gz {BROKEN}"),
        (TRAIN_IMAGES + ".xz", lzma.compress(IMAGES)[:-20], f"a whole .xz {BROKEN}"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_fault_in_folder(tmp_path: Path, file: str, content: bytes | None, says: str):
    write(tmp_path, "")
    (tmp_path / file.removesuffix(".gz").removesuffix(".xz")).unlink()
    if content is not None:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(mnist.DataError) as caught:
        mnist.load(str(tmp_path))
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / file}: expected ")
    assert says in message
    assert message.endswith("; give --data download for the published files")


def zeros(suffix: str) -> bytes:
    """Returns 256 MiB of them, in less than a thousandth of that."""
    compressor = {".gz": zlib.compressobj(1, wbits=31), ".xz": lzma.LZMACompressor(preset=0)}
    pack, mebibyte = compressor[suffix], bytes(2**20)
    return b"".join([*(pack.compress(mebibyte) for _ in range(256)), pack.flush()])


@pytest.mark.parametrize("suffix", PACKS)
def test_files_that_are_too_large_are_not_read_whole(tmp_path: Path, suffix: str):
    with (write(tmp_path, suffix) / (TEST_LABELS + suffix)).open("wb") as file:
        if suffix:
            file.write(zeros(suffix))
        else:
            file.truncate(2**40)  # with holes
    tracemalloc.start()
    with pytest.raises(mnist.DataError, match="expected 47040016 bytes at most.*found more"):
        mnist.load(str(tmp_path))
    assert tracemalloc.get_traced_memory()[1] < 4 * mnist.LARGEST
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("source", "says"), [("nowhere", "found no such folder"), ("file", "can be read, found")]
)
def test_what_is_no_folder_is_named_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, says: str
):
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(mnist.DataError) as caught:
        mnist.load(source)
    message = str(caught.value)
    assert message.startswith(str(tmp_path / source / TRAIN_IMAGES))
    assert says in message
    assert "--data download" in message


@pytest.fixture
def mirrors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Returns two mirrors, of which only the second has the files; the cache is empty."""
    pair = tmp_path / "first", write(tmp_path / "second", ".gz")
    monkeypatch.setattr(mnist, "MIRRORS", tuple(mirror.as_uri() + "/" for mirror in pair))
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in TINY.items()}
    monkeypatch.setattr(mnist, "SHA256_UNPACKED", digests)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return pair


def withdraw(mirror: Path) -> None:
    for file in mirror.iterdir():
        file.unlink()


@pytest.mark.parametrize("first", ["whole", "empty", "with other files"])
def test_download(tmp_path: Path, mirrors: tuple[Path, Path], first: str):
    if first == "whole":
        write(mirrors[0], ".gz")
        withdraw(mirrors[1])
    elif first == "with other files":
        write(mirrors[0], ".gz", dict.fromkeys(NAMES, b"other"))
    assert_tiny(mnist.load("download"))
    cached = contents(tmp_path / "cache" / "eqx-norm" / "mnist")
    assert sorted(cached) == sorted(f"{name}.gz" for name in NAMES)
    for mirror in mirrors:  # a second time it needs none
        if mirror.exists():
            withdraw(mirror)
    assert_tiny(mnist.load("download"))


@pytest.mark.usefixtures("mirrors")
@pytest.mark.parametrize("damage", ["empty", "not gzip", "another file"])
def test_damaged_cache_is_repaired(tmp_path: Path, damage: str):
    mnist.load("download")
    file = tmp_path / "cache" / "eqx-norm" / "mnist" / f"{TEST_IMAGES}.gz"
    whole = file.read_bytes()
    another = gzip.compress(b"other")
    file.write_bytes({"empty": b"", "not gzip": b"broken", "another file": another}[damage])
    assert_tiny(mnist.load("download"))
    assert file.read_bytes() == whole


@pytest.mark.usefixtures("mirrors")
def test_without_xdg_cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    mnist.load("download")
    assert (tmp_path / ".cache" / "eqx-norm" / "mnist" / f"{TRAIN_IMAGES}.gz").is_file()


def assert_download_fails(*says: str) -> None:
    with pytest.raises(mnist.DataError) as caught:
        mnist.load("download")
    message = str(caught.value)
    for part in (*says, "; give --data subset, or --data FOLDER"):
        assert part in message


def test_wrong_checksum(tmp_path: Path, mirrors: tuple[Path, Path]):
    write(mirrors[1], ".gz", {TRAIN_LABELS: b"other"})
    assert_download_fails(
        f"{mirrors[1].as_uri()}/{TRAIN_LABELS}.gz: expected SHA-256 ",
        mnist.SHA256_UNPACKED[TRAIN_LABELS],
        hashlib.sha256(b"other").hexdigest(),
    )
    assert not (tmp_path / "cache" / "eqx-norm" / "mnist" / f"{TRAIN_LABELS}.gz").exists()


def test_no_mirror_reached(mirrors: tuple[Path, Path]):
    withdraw(mirrors[1])
    assert_download_fails(
        *(f"{mirror.as_uri()}/{TRAIN_IMAGES}.gz: expected the file" for mirror in mirrors)
    )


@pytest.mark.usefixtures("mirrors")
def test_cache_cannot_be_written(tmp_path: Path):
    (tmp_path / "cache").touch()
    where = tmp_path / "cache" / "eqx-norm" / "mnist" / f"{TRAIN_IMAGES}.gz"
    assert_download_fails(str(where), "XDG_CACHE_HOME")


def test_subset():
    train, test = mnist.load()
    assert train.images.shape == (10_000, 28, 28)
    assert test.images.shape == (2_000, 28, 28)
    per_digit = [1001, 1127, 991, 1032, 980, 863, 1014, 1070, 944, 978]
    assert np.bincount(train.labels).tolist() == per_digit
    assert np.bincount(test.labels).tolist() == [
        *(175, 234, 219, 207, 217),
        *(179, 178, 205, 192, 194),
    ]


@pytest.mark.parametrize("name", NAMES)
def test_subset_is_what_its_readme_says(name: str):
    packed = (mnist.SUBSET / f"{name}.xz").read_bytes()
    digest = hashlib.sha256(lzma.decompress(packed)).hexdigest()
    lines = (mnist.SUBSET / "README.md").read_text(encoding="utf-8").splitlines()
    (line,) = (line for line in lines if line.startswith(f"| {name}.xz |"))
    assert line.endswith(f"| {len(packed):,} | {digest} |")


def test_damaged_subset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mnist, "SUBSET", tmp_path)
    with pytest.raises(mnist.DataError) as caught:
        mnist.load()
    assert str(tmp_path / TRAIN_IMAGES) in str(caught.value)
    assert "git checkout experiments/data/mnist" in str(caught.value)


def test_subset_is_the_beginning_of_mnist():
    if not PUBLISHED.is_dir():
        pytest.skip("needs the published files in ../shared/data/mnist")
    for name, content in make_subset.subset(mnist.load(str(PUBLISHED))).items():
        assert lzma.decompress((mnist.SUBSET / f"{name}.xz").read_bytes()) == content


@pytest.fixture
def tiny_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_subset, "TRAIN_COUNT", 3)
    monkeypatch.setattr(make_subset, "TEST_COUNT", 1)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.usefixtures("tiny_counts")
def test_rebuild_is_the_same_bit_for_bit(tmp_path: Path):
    source = str(write(tmp_path / "source", ".gz"))
    for out in ("once", "again"):
        assert make_subset.main(["--data", source, "--out", str(tmp_path / out)]) == 0
    once = contents(tmp_path / "once")
    assert once == contents(tmp_path / "again")
    files = make_subset.subset(mnist.load(source))
    assert once == {f"{name}.xz": make_subset.packed(file) for name, file in files.items()}

    train, test = mnist.load(str(tmp_path / "once"))
    assert train.labels.tolist() == [3, 1, 4]
    assert train.images.tobytes() == TINY[TRAIN_IMAGES][16 : 16 + 3 * 784]
    assert test.labels.tolist() == [0]


@pytest.mark.usefixtures("tiny_counts")
def test_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "out"
    build = ["--data", str(write(tmp_path / "source", "")), "--out", str(out)]
    make_subset.main(build)
    assert make_subset.main([*build, "--check"]) == 0
    assert capsys.readouterr().out.count("the same\n") == 4

    (out / f"{TRAIN_IMAGES}.xz").unlink()
    (out / f"{TRAIN_LABELS}.xz").write_bytes(b"broken")
    (out / f"{TEST_IMAGES}.xz").write_bytes(lzma.compress(TINY[TEST_IMAGES]))
    labels = make_subset.subset(mnist.load(build[1]))[TEST_LABELS]
    repacked = lzma.compress(labels, check=lzma.CHECK_CRC32)
    (out / f"{TEST_LABELS}.xz").write_bytes(repacked)
    before = contents(out)
    assert make_subset.main([*build, "--check"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"{TRAIN_IMAGES}.xz: is missing",
        f"{TRAIN_LABELS}.xz: differs",
        f"{TEST_IMAGES}.xz: differs",
        f"{TEST_LABELS}.xz: holds the same data, packed by another version of xz",
    ]
    assert contents(out) == before


def test_too_few_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source = str(write(tmp_path / "source", ""))
    with pytest.raises(SystemExit) as caught:
        make_subset.main(["--data", source, "--out", str(tmp_path / "out")])
    assert caught.value.code == 2
    message = capsys.readouterr().err
    assert f"{TRAIN_IMAGES}: expected at least 10000 images, found 5" in message
    assert "give --data download" in message
    assert not (tmp_path / "out").exists()


def test_scaled():
    images = np.arange(256, dtype=np.uint8).reshape(1, 16, 16)
    found = mnist.scaled(images)
    assert found.shape == (1, 1, 16, 16)
    assert found.dtype == np.float32
    exact = (np.arange(256) / 255 - 0.5) / 0.5
    np.testing.assert_allclose(found.ravel(), exact, rtol=0, atol=2e-7)
    assert found.min() == -1
    assert found.max() == 1
