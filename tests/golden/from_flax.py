"""Runs the cases in Flax, both APIs: `python -m tests.golden.from_flax` writes `flax.npz`."""

import flax  # pyright: ignore[reportMissingImports]  (only make test-peers installs it)

from experiments.lab import peers
from experiments.lab.peers import names
from tests.golden import cases

APIS = {"linen": names.LINEN_TWO_PASS, "nnx": names.NNX_TWO_PASS}


def run(case: cases.Case) -> cases.Arrays:
    settings = {"momentum": case.momentum, "eps": cases.EPS, "affine": case.affine}
    layer = peers.batch_norm(APIS[case.layer], case.channels, **settings)
    return cases.run(case, layer, layer.memory)


if __name__ == "__main__":
    cases.write("flax", run, flax.__version__)
