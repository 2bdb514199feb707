"""A mask of a wrong shape or dtype is refused with a sentence."""

import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from .helpers import call, copy
from .masking import C, L, N, X, close, untrained

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((N, L + 1), r"mask has shape \(6,\).*\(3, 5\).*shape \(\),.*shape \(5,\)"),
        ((N, 1, L), r"mask has shape \(1, 5\).*\(3, 5\).*shape \(\),.*shape \(5,\)"),
        ((N, C, L), r"mask has shape \(3, 5\).*\(3, 5\).*the channels share it"),
    ],
    ids=["length", "axes", "channels"],
)
@pytest.mark.parametrize("inference", [False, True], ids=["training", "inference"])
def test_a_wrong_shape(shape, message, inference):
    layer, state = untrained("batch", inference=inference)

    def fail_then_succeed(x, mask, state):
        with pytest.raises(ValueError, match=message):
            layer(x, state, mask=mask)
        return layer(x, state)

    axes = {"in_axes": (0, 0, None), "out_axes": (0, None)}
    forward = jax.vmap(fail_then_succeed, axis_name="batch", **axes)
    y, _ = forward(X, np.ones(shape, bool), copy(state))
    close(y, call(layer, state, X)[0])


# In these tests the annotations are checked and speak first, so look at what a user sees, in a
# process of its own.
WRONG_DTYPES = """
import jax, equinox as eqx, numpy as np
from eqx_norm import BatchNorm

layer, state = eqx.nn.make_with_state(BatchNorm)(3, "batch", approach="batch")

def fail_then_succeed(x, mask, state):
    try:
        layer(x, state, mask=mask)
    except TypeError as error:
        print(error)
    return layer(x, state)

axes = dict(in_axes=(0, 0, None), out_axes=(0, None))
for dtype in (np.float32, np.int32):
    mask = np.ones((6, 5), dtype)
    _, state = jax.vmap(fail_then_succeed, axis_name="batch", **axes)(
        np.ones((6, 3, 5), np.float32), mask, state
    )
"""


def test_a_wrong_dtype():
    command = [sys.executable, "-c", WRONG_DTYPES]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for line, dtype in zip(run.stdout.splitlines(), ("float32", "int32"), strict=True):
        assert line.startswith(f"mask has dtype {dtype}")
        assert "give booleans, for example mask > 0" in line
