"""Writes out the recursion of each strategy in NumPy's float64, to compare with."""

import numpy as np

from eqx_norm.strategies import Adam, Batch, Ema, SmoothStart, VarianceClip

# Each of these yields, per batch, (mean, variance) for training and the same for inference.


def of_batch(batches, m):
    h, w = 0.0, 0.0
    for b in map(np.array, batches):
        h, w = m * h + (1 - m) * b, m * w + 1 - m
        yield b, h / w


def of_ema(batches, m):
    r = None
    for b in map(np.array, batches):
        r = b if r is None else m * r + (1 - m) * b
        yield r, r


def of_adam(batches, m):
    for _, debiased in of_batch(batches, m):
        yield debiased, debiased


def of_smooth_start(batches, m):
    h = 0.0
    for k, b in enumerate(map(np.array, batches), start=1):
        h = m * h + (1 - m) * b
        yield h + m**k * b, h / (1 - m**k)


def of_variance_clip(recursion, ratio, start):
    def run(batches, m):
        clipped = []
        for k, (mean, variance) in enumerate(batches):
            if k >= start:
                *_, (_, (_, g)) = recursion(clipped, m)
                variance = np.clip(variance, g / ratio, ratio * (g + g.mean()))
            clipped.append((mean, variance))
            *_, last = recursion(clipped, m)
            yield last

    return run


# Strategies, made of a momentum, and their recursions.
CASES = [
    (Batch, of_batch),
    (Ema, of_ema),
    (Adam, of_adam),
    (SmoothStart, of_smooth_start),
    (
        lambda m: VarianceClip(Batch(m), ratio=2.0, start=4),
        of_variance_clip(of_batch, 2.0, 4),
    ),
    (
        lambda m: VarianceClip(SmoothStart(m), ratio=4.0, start=1),
        of_variance_clip(of_smooth_start, 4.0, 1),
    ),
    (
        lambda m: VarianceClip(Ema(m), ratio=4.0, start=200),
        of_variance_clip(of_ema, 4.0, 200),
    ),
]
IDS = ["batch", "ema", "adam", "smooth_start", "clip(batch)", "clip(smooth_start)", "clip(ema)"]
