"""The variance clipping experiment corrupts batches as it says, and finds what it says."""

import json

import numpy as np
import pytest

from experiments.lab import curves, mnist, rows
from experiments.lab.experiment import Files
from experiments.variance_clipping.__main__ import EXPERIMENT
from experiments.variance_clipping.claims import FOUND
from experiments.variance_clipping.runs import (
    CLEAN,
    CORRUPTED,
    ONE_IMAGE,
    Setting,
    Step,
    corrupted,
)


@pytest.mark.long
def test_quick_finds_what_it_says(tmp_path):
    """The quick job fails unless what is found here is found."""
    files = Files(tmp_path, "variance_clipping")
    assert EXPERIMENT.main(["--quick", "--out", str(tmp_path)]) == 0
    # Both failures are there; clipping prevents neither everywhere.
    thread = [True, True, False, False, False]
    written = json.loads(files.json.read_text())
    assert [claim["holds"] for claim in written["claims"]] == [*thread, *[True] * len(FOUND)]
    for suffix in ("_scaled", "_one_image"):
        assert files.figure(suffix).stat().st_size > 10_000
    # All runs of an approach are alike until the first corrupted batch.
    found = curves.by_setting(rows.load(files.csv("_curves"), Step), Setting)
    first = int(np.argmax(found[Setting("ema", False, CLEAN)]["step"] == CORRUPTED[0]))
    clean, *others = (
        np.stack([*run.values()]) for s, run in found.items() if s[:2] == ("ema", False)
    )
    for other in others:
        np.testing.assert_array_equal(clean[..., :first], other[..., :first])
        assert (clean[..., first:] != other[..., first:]).any()


@pytest.mark.parametrize(
    ("corruption", "variance", "mean"),  # what they are multiplied by; None: by anything
    [
        ("none", 1, 1),
        ("scaled by 1e3", 1e6, 1e3),
        ("contrast by 1e3", 1e6, 1),
        ("constant", 0, None),
        ("constant 1e3", 0, None),
        ("scaled by 1e-3", 1e-6, 1e-3),
    ],
)
def test_corruptions_do_to_the_norm_s_input_what_they_say(corruption, variance, mean):
    images = mnist.scaled(mnist.load().train.images[:64])
    changed = corrupted(images, corruption)
    assert (changed.dtype, changed.shape) == (images.dtype, images.shape)
    weights = np.random.RandomState(0).standard_normal((28 * 28, 8))
    before, after = (
        ((x.reshape(64, -1).astype(np.float64) + 1) / 2) @ weights for x in (images, changed)
    )
    # float32 knows 1e-3 times an image from black, which is -1, to 6e-8 / 1e-3.
    np.testing.assert_allclose(after.var(0) / before.var(0), variance, rtol=1e-3, atol=1e-12)
    if mean is not None:
        np.testing.assert_allclose(after.mean(0) / before.mean(0), mean, rtol=2e-3)


def test_one_image_is_one_image():
    images = mnist.scaled(mnist.load().train.images[:64])
    changed = corrupted(images, ONE_IMAGE)
    np.testing.assert_array_equal(changed[1:], images[1:])
    assert (changed[0].min(), changed[0].max()) == (-1, pytest.approx(2 * 1000 - 1))
