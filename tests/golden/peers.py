"""Trains in PyTorch and Flax: `python -m tests.golden.peers` writes what they give."""

from typing import Any

# Only make test-peers installs them.
import flax  # pyright: ignore[reportMissingImports]
import jax
import torch  # pyright: ignore[reportMissingImports]
from flax import linen  # pyright: ignore[reportMissingImports]

from .cases import EPS, MOMENTUM, SHAPE, Arrays, record, write


def in_torch() -> Arrays:
    layer = torch.nn.BatchNorm2d(SHAPE[1], eps=EPS, momentum=1 - MOMENTUM)

    def step(affine: Arrays, *arrays: Any) -> dict[str, Any]:
        x, dy, probe = map(torch.from_numpy, arrays)
        for name, value in affine.items():
            setattr(layer, name, torch.nn.Parameter(torch.from_numpy(value)))
        y = layer.train()(x.requires_grad_())
        y.backward(dy)
        outputs = {f"d{name}": getattr(layer, name).grad for name in affine}
        outputs |= {"y": y, "inference": layer.eval()(probe), "dx": x.grad}
        outputs |= {"running_mean": layer.running_mean, "running_var": layer.running_var}
        return {name: tensor.numpy(force=True) for name, tensor in outputs.items()}

    return record("torch", step)


def in_flax() -> Arrays:
    names = {"weight": "scale", "bias": "bias"}
    layer = linen.BatchNorm(momentum=MOMENTUM, epsilon=EPS, use_fast_variance=False, axis=1)
    variables: Any = layer.init(jax.random.key(0), jax.numpy.zeros(SHAPE), True)

    @jax.jit
    def call(variables: Any, x: Any, dy: Any, probe: Any) -> Any:
        def train(params: Any, x: Any) -> Any:
            inputs = {**variables, "params": params}
            return layer.apply(inputs, x, False, mutable=["batch_stats"])

        y, pull_back, after = jax.vjp(train, variables["params"], x, has_aux=True)
        inference = layer.apply({**variables, **after}, probe, True)
        return after, {"y": y, "inference": inference}, pull_back(dy)

    def step(affine: Arrays, *arrays: Any) -> dict[str, Any]:
        variables["params"] = {names[name]: value for name, value in affine.items()}
        after, outputs, (gradients, dx) = call(variables, *arrays)
        variables.update(after)
        outputs |= {f"d{name}": gradients[names[name]] for name in affine}
        statistics = variables["batch_stats"]
        outputs |= {"running_mean": statistics["mean"], "running_var": statistics["var"]}
        return {**outputs, "dx": dx}

    return record("flax", step)


RUN = {"torch": in_torch, "flax": in_flax}

if __name__ == "__main__":
    for peer, module in (("torch", torch), ("flax", flax)):
        write(peer, RUN[peer](), module.__version__)
