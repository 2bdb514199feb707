"""Runs the cases in Flax, both APIs: `python -m tests.golden.from_flax` writes `flax.npz`."""

from collections.abc import Callable
from typing import Any

import flax  # pyright: ignore[reportMissingImports]  (only make test-peers installs it)
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx  # pyright: ignore[reportMissingImports]  (as above)

from tests.golden import cases

THEIRS = {"weight": "scale", "bias": "bias"}
# (parameters, statistics, x, whether to infer) to (y, statistics).
Apply = Callable[[Any, Any, jax.Array, bool], tuple[jax.Array, Any]]


def _linen(case: cases.Case) -> tuple[Apply, Any]:
    layer = linen.BatchNorm(
        momentum=case.momentum,
        epsilon=cases.EPS,
        use_bias=case.affine,
        use_scale=case.affine,
        use_fast_variance=False,
    )

    def apply(parameters: Any, statistics: Any, x: jax.Array, infer: bool):
        variables = {"params": parameters, "batch_stats": statistics}
        y, after = layer.apply(variables, x, use_running_average=infer, mutable=["batch_stats"])
        return y, after["batch_stats"]

    x = jnp.zeros((1, case.channels))
    return apply, layer.init(jax.random.key(0), x, use_running_average=True)["batch_stats"]


def _nnx(case: cases.Case) -> tuple[Apply, Any]:
    def make() -> nnx.BatchNorm:
        return nnx.BatchNorm(
            case.channels,
            momentum=case.momentum,
            epsilon=cases.EPS,
            use_bias=case.affine,
            use_scale=case.affine,
            use_fast_variance=False,
            rngs=nnx.Rngs(0),
        )

    def statistics_of(layer: nnx.BatchNorm) -> Any:
        return nnx.to_pure_dict(nnx.state(layer, nnx.BatchStat))

    def apply(parameters: Any, statistics: Any, x: jax.Array, infer: bool):
        layer = make()
        nnx.update(layer, {**parameters, **statistics})
        y = layer(x, use_running_average=infer)
        return y, statistics_of(layer)

    return apply, statistics_of(make())


def run(case: cases.Case) -> cases.Arrays:
    apply, statistics = {"linen": _linen, "nnx": _nnx}[case.layer](case)

    @jax.jit
    def train_and_infer(parameters: Any, statistics: Any, x: Any, dy: Any, probe: Any) -> Any:
        def loss(parameters: Any, x: Any) -> Any:
            y, after = apply(parameters, statistics, x, False)
            return jnp.sum(y * dy), (y, after)

        gradients, (y, after) = jax.grad(loss, argnums=(0, 1), has_aux=True)(parameters, x)
        return y, after, gradients, apply(parameters, after, probe, True)[0]

    def step(
        affine: cases.Arrays, x: np.ndarray, dy: np.ndarray, probe: np.ndarray
    ) -> dict[str, Any]:
        nonlocal statistics
        parameters = {THEIRS[name]: value for name, value in affine.items()}
        batches = (np.moveaxis(batch, 1, -1) for batch in (x, dy, probe))
        y, statistics, (gradients, dx), inference = train_and_infer(
            parameters, statistics, *batches
        )
        return {
            "y": np.moveaxis(y, -1, 1),
            "inference": np.moveaxis(inference, -1, 1),
            "dx": np.moveaxis(dx, -1, 1),
            **{f"d{name}": gradients[THEIRS[name]] for name in affine},
            "running_mean": statistics["mean"],
            "running_var": statistics["var"],
        }

    return cases.record(case, step)


if __name__ == "__main__":
    cases.write("flax", run, flax.__version__)
