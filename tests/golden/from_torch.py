"""Runs the cases in PyTorch: `python -m tests.golden.from_torch` writes `torch.npz`."""

from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]  (only make test-peers installs it)

from tests.golden import cases


def run(case: cases.Case) -> cases.Arrays:
    layer = getattr(torch.nn, case.layer)(
        case.channels, eps=cases.EPS, momentum=case.momentum, affine=case.affine
    )

    def step(
        affine: cases.Arrays, x: np.ndarray, dy: np.ndarray, probe: np.ndarray
    ) -> dict[str, Any]:
        for name, value in affine.items():
            setattr(layer, name, torch.nn.Parameter(torch.from_numpy(value)))
        inputs = torch.from_numpy(x).requires_grad_()
        y = layer.train()(inputs)
        (y * torch.from_numpy(dy)).sum().backward()
        with torch.no_grad():
            inference = layer.eval()(torch.from_numpy(probe))
        outputs = {
            "y": y,
            "inference": inference,
            "dx": inputs.grad,
            **{f"d{name}": getattr(layer, name).grad for name in affine},
            "running_mean": layer.running_mean,
            "running_var": layer.running_var,
        }
        return {name: tensor.numpy(force=True) for name, tensor in outputs.items()}

    return cases.record(case, step)


if __name__ == "__main__":
    cases.write("torch", run, torch.__version__)
