"""Runs the cases in Flax: `python -m tests.golden.from_flax` writes `flax.npz`."""

import flax  # pyright: ignore[reportMissingImports]  (only make test-peers installs it)

from experiments.common import peers
from tests.golden import cases


def run(case: cases.Case) -> cases.Arrays:
    settings = {"momentum": case.momentum, "eps": cases.EPS, "affine": case.affine}
    layer = peers.batch_norm(peers.FLAX_TWO_PASS, case.channels, **settings)
    return cases.run(case, layer, layer.memory)


if __name__ == "__main__":
    cases.write("flax", run, flax.__version__)
