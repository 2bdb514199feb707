"""Runs the cases in Flax, both APIs: `python -m tests.golden.from_flax` writes `flax.npz`."""

from typing import Any

import flax  # pyright: ignore[reportMissingImports]  (only make test-peers installs it)
import jax
import jax.numpy as jnp
import numpy as np

from experiments.lab import peers
from experiments.lab.peers import names
from tests.golden import cases

APIS = {"linen": names.LINEN_TWO_PASS, "nnx": names.NNX_TWO_PASS}


def run(case: cases.Case) -> cases.Arrays:
    layer = peers.batch_norm(
        APIS[case.layer],
        case.channels,
        momentum=case.momentum,
        eps=cases.EPS,
        affine=case.affine,
    )
    memory = layer.memory

    @jax.jit
    def train_and_infer(parameters: Any, memory: Any, x: Any, dy: Any, probe: Any) -> Any:
        def loss(parameters: Any, x: Any) -> Any:
            y, after = layer.train(parameters, memory, x)
            return jnp.sum(y * dy), (y, after)

        gradients, (y, after) = jax.grad(loss, argnums=(0, 1), has_aux=True)(parameters, x)
        return y, after, gradients, layer.evaluate(parameters, after, probe)[0]

    def step(
        affine: cases.Arrays, x: np.ndarray, dy: np.ndarray, probe: np.ndarray
    ) -> dict[str, Any]:
        nonlocal memory
        parameters = affine.get("weight"), affine.get("bias")
        y, memory, (gradients, dx), inference = train_and_infer(
            parameters, memory, x, dy, probe
        )
        by_name = dict(zip(("dweight", "dbias"), gradients, strict=True)) if affine else {}
        mean, variance = layer.statistics(memory)
        return {
            "y": y,
            "inference": inference,
            "dx": dx,
            **by_name,
            "running_mean": mean,
            "running_var": variance,
        }

    return cases.record(case, step)


if __name__ == "__main__":
    cases.write("flax", run, flax.__version__)
