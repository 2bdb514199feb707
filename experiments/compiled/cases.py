"""Lists the programs that are compiled."""

import itertools
from collections.abc import Iterator

from experiments.lab.passes import BOTH, FORWARD, NO_NORM
from experiments.lab.peers import names

from .programs import (
    APART,
    BATCH_NORM,
    BETWEEN,
    DIRECTIONS,
    LAYER_NORM,
    LAYER_NORM_GELU,
    RELU_AFTER,
    Case,
)

DENSE, IMAGES = (65536, 256), (64, 64, 32, 32)
# Shapes of a ResNet-50, channels side by side as convolutions leave them on a GPU.
ALIGNED = [(BATCH_NORM, s) for s in (DENSE, (802816, 64), (6272, 1024), (1568, 2048))]
# Others: 200 and 33 channels; images as they come from the user, in 3 channels and in one; rows
# that are read twice, and rows that a program holds. Mosaic's kernels serve none of these.
OTHERS = [
    *((BATCH_NORM, shape) for shape in ((65521, 200), (65521, 33))),
    *((BATCH_NORM, shape) for shape in ((32, 3, 224, 224), (64, 1, 1000, 1000))),
    *((LAYER_NORM, shape) for shape in ((8192, 16384), (64, 1000000))),
    *((LAYER_NORM_GELU, (8192, values)) for values in (768, 1000, 4096)),
]
QUICK = [ALIGNED[0], OTHERS[1], OTHERS[-3]]
DTYPES = ("bfloat16", "float32", "float16")


def cases(device: str, quick: bool) -> list[Case]:
    """Returns those for one device, on an H200 with what the kernels are compared with."""
    compared = _layers(quick) if device == "H200" else ()
    return list(dict.fromkeys([*compared, *_kernels(device, quick)]))


def _layers(quick: bool) -> Iterator[Case]:
    wanted = [names.OURS_XLA]
    if not quick:
        wanted += [names.OURS_TRITON, RELU_AFTER, names.EQUINOX_BATCH, names.EQUINOX_EMA]
    directions = (BOTH,) if quick else DIRECTIONS
    for norm in itertools.product((DENSE, IMAGES), DTYPES[:2], directions, wanted):
        yield Case("H200", BATCH_NORM, *norm)
    for dtype, name in itertools.product(DTYPES[:2], wanted):
        yield Case("H200", BETWEEN, IMAGES, dtype, BOTH, name)


def _kernels(device: str, quick: bool) -> Iterator[Case]:
    dtypes = DTYPES[:1] if quick else DTYPES
    read = QUICK if quick else [*ALIGNED, *OTHERS]
    mosaic = [names.OURS_MOSAIC] * (device != "A100")
    for norm, dtype, direction in itertools.product(read, dtypes, (FORWARD, APART)):
        program, shape = norm
        by = [names.OURS_TRITON] + mosaic * (norm in ALIGNED)
        if device == "H200" and program != LAYER_NORM_GELU and dtype != "float16" and not quick:
            by.append(names.OURS_XLA)
        for name in by:
            yield Case(device, program, shape, dtype, direction, name)
    between = (NO_NORM, names.OURS_XLA, names.OURS_TRITON, *mosaic)
    for dtype, name in itertools.product(DTYPES[:2], between):
        yield Case(device, BETWEEN, IMAGES, dtype, BOTH, name)
