"""PyTorch's part in the benchmark: `torch.nn.functional`, run eagerly, as it usually is."""

from typing import Any

import jax
import numpy as np

from . import results
from .benchmark_layers import EPS, MOMENTUM, Numbers, Outputs, Pass, Program


def usable() -> bool:
    """On the device that JAX runs on; a race between a GPU and a CPU tells nothing."""
    import torch  # pyright: ignore[reportMissingImports]  (only with the peers)

    return jax.default_backend() == "cpu" or torch.cuda.is_available()


def programs(given: Numbers, dtype: str) -> dict[Pass, Program]:
    """Weights and statistics are f32, as torch allows them to be for a bf16 input."""
    import torch  # pyright: ignore[reportMissingImports]  (as above)

    torch.set_num_threads(results.environment()["cores"])  # what XLA uses
    device = "cpu" if jax.default_backend() == "cpu" else "cuda"
    half = {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]
    x, dy = (torch.tensor(a, device=device).to(half) for a in (given.x, given.dy))
    weight, bias = (torch.tensor(a, device=device) for a in (given.weight, given.bias))
    mean, variance = torch.zeros_like(bias), torch.ones_like(weight)
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]

    def layer() -> Any:
        y = torch.nn.functional.batch_norm(
            x, mean, variance, weight, bias, training=True, momentum=1 - MOMENTUM, eps=EPS
        )
        return torch.nn.functional.relu(y, inplace=True)  # the faster way, and a usual one

    def forward() -> Any:
        with torch.no_grad():
            return layer()

    def forward_and_backward() -> Any:
        y = layer()
        return y, torch.autograd.grad(y, leaves, dy)

    def wait(result: Any) -> Any:
        if device == "cuda":
            torch.cuda.synchronize()
        return result

    return {
        "forward": Program(forward, wait),
        "forward + backward": Program(forward_and_backward, wait),
    }


def outputs(result: Any) -> Outputs:
    y, gradients = result
    return Outputs(*(np.asarray(t.detach().cpu().float().numpy()) for t in (y, *gradients)))
