"""Runs the cases in Flax: `python -m tests.golden.from_flax` writes `flax.npz`."""

from typing import Any

import flax  # pyright: ignore[reportMissingImports]  (only make test-peers installs it)
import jax
import jax.numpy as jnp
from flax import linen  # pyright: ignore[reportMissingImports]

from tests.golden import cases


def run(case: cases.Case) -> cases.Arrays:
    options: dict[str, Any] = {"use_scale": case.affine, "use_bias": case.affine, "axis": 1}
    layer = linen.BatchNorm(
        momentum=case.momentum, epsilon=cases.EPS, use_fast_variance=False, **options
    )
    statistics = {"mean": jnp.zeros(case.channels), "var": jnp.ones(case.channels)}

    @jax.jit
    def train_and_infer(affine: Any, statistics: Any, x: Any, dy: Any, probe: Any) -> Any:
        def loss(affine: Any, x: Any) -> Any:
            variables = {"params": affine, "batch_stats": statistics}
            y, after = layer.apply(variables, x, False, mutable=["batch_stats"])
            return jnp.sum(y * dy), (y, after["batch_stats"])

        gradients, (y, after) = jax.grad(loss, argnums=(0, 1), has_aux=True)(affine, x)
        inference = layer.apply({"params": affine, "batch_stats": after}, probe, True)
        return y, after, gradients, inference

    def step(affine: cases.Arrays, x: Any, dy: Any, probe: Any) -> dict[str, Any]:
        nonlocal statistics
        names = {"scale": "weight", "bias": "bias"} if case.affine else {}
        parameters = {name: affine[ours] for name, ours in names.items()}
        y, statistics, (gradients, dx), inference = train_and_infer(
            parameters, statistics, x, dy, probe
        )
        outputs = {f"d{ours}": gradients[name] for name, ours in names.items()}
        outputs |= {"y": y, "inference": inference, "dx": dx}
        mean, variance = statistics["mean"], statistics["var"]
        return {**outputs, "running_mean": mean, "running_var": variance}

    return cases.record(case, step)


if __name__ == "__main__":
    cases.write("flax", run, flax.__version__)
