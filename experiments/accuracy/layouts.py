"""Gives a batch to a layer in another layout, and brings the answer back to the batch's."""

import numpy as np
from numpy.typing import NDArray

from experiments.lab import answers
from experiments.lab.exact import Answer, Batch

FIRST, LAST, ROWS = "channels first", "channels last", "rows"
LINE = 128  # channels, of any dtype


def channels_last(layer: str, batch: Batch) -> Answer:
    """Returns the answer of a batch norm to `[n, C]`, as convolutions on a GPU have it.

    The channels are repeated until they fill lines of memory: a Mosaic kernel takes no less.
    """
    n, channels, *space = batch.x.shape
    repeated = np.arange(-(-channels // LINE) * LINE) % channels

    def columns(values: NDArray) -> NDArray:
        return np.moveaxis(values, 1, -1).reshape(-1, channels)[:, repeated]

    def back(values: NDArray) -> NDArray:
        return np.moveaxis(values[:, :channels].reshape(n, *space, channels), -1, 1)

    weight, bias = batch.weight[repeated], batch.bias[repeated]
    gave = answers.batch_norm(layer, Batch(columns(batch.x), columns(batch.dy), weight, bias))
    variance, dweight, dbias = (v[:channels] for v in (gave.variance, gave.dweight, gave.dbias))
    return Answer(back(gave.y), variance, back(gave.dx), dweight, dbias)


def rows(layer: str, batch: Batch) -> Answer:
    """Returns the answer of a layer norm that is given each channel as an example.

    It remembers no variance, and has no weight and bias for each channel.
    """
    n, channels, *space = batch.x.shape
    x, dy = (np.moveaxis(a, 1, 0).reshape(channels, -1) for a in (batch.x, batch.dy))
    ones = np.ones(x.shape[1], np.float32)
    gave = answers.layer_norm(layer, Batch(x, dy, ones, 0 * ones))
    y, dx = (np.moveaxis(a.reshape(channels, n, *space), 0, 1) for a in (gave.y, gave.dx))
    return Answer(y, None, dx, None, None)


# The answer of a layer to a batch, by the layout in which it is given.
LAYOUTS = {FIRST: answers.batch_norm, LAST: channels_last, ROWS: rows}
