"""Lists what the batch norms of networks are given."""

import itertools
from collections.abc import Sequence

Shape = tuple[int, ...]

# Channels and height, as published, of the distinct ones of each, on images of 224.
RESNET_50 = (
    *((64, 112), (64, 56), (256, 56), (128, 28), (512, 28)),
    *((256, 14), (1024, 14), (512, 7), (2048, 7)),
)
MOBILENET_V2 = (
    *((32, 112), (16, 112), (96, 112), (96, 56), (24, 56), (144, 56), (144, 28), (32, 28)),
    *((192, 28), (192, 14), (64, 14), (384, 14), (96, 14), (576, 14), (576, 7), (160, 7)),
    *((960, 7), (320, 7), (1280, 7)),
)
CONVNEXT_T = ((96, 56), (192, 28), (384, 14), (768, 7))  # were its norms batch norms
PERCEPTRONS = ((256, 256), (256, 1024), (1024, 512), (2048, 256), (2048, 1024))
ODD = ((48, 96, 20, 20), (32, 64, 17, 23))
# The last is that of a ViT-S.
LAYER_NORM = ((64, 512), (1024, 256), (1024, 1024), (8192, 1024), (32 * 197, 384))


def images(batch: int, *networks: Sequence[tuple[int, int]]) -> tuple[Shape, ...]:
    """Returns the distinct shapes of a batch norm's x in these networks."""
    distinct = dict.fromkeys(itertools.chain(*networks))
    return tuple((batch, channels, size, size) for channels, size in distinct)


def shape_name(shape: Shape) -> str:
    return "x".join(map(str, shape))
