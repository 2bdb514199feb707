"""PyTorch's layers on a GPU: eager and compiled, in both memory formats, timed by CUDA events.

As with JAX, several instances of a layer are one call: a CUDA graph, replayed. That takes the
host's part out of it, which is most of the time of a small layer that is called from Python.
Where a graph cannot be captured, the layer is called as it is.

Weights are float32, as torch allows them to be for batch norm in bfloat16. Its layer norm on a
GPU wants them in the dtype of x.
"""

import importlib.util
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import gpu_run_timing
from .benchmark_layers import BOTH, EPS, MOMENTUM, Numbers, Outputs, Pass
from .gpu_run_job import BATCH_NORM, LAST, Problem
from .gpu_run_timing import Taken

TORCH, COMPILED = "torch", "torch compiled"


def missing(gpu: bool) -> str | None:
    """Why torch has no part in it; `None` where it has."""
    if importlib.util.find_spec("torch") is None:
        return "not installed"
    import torch  # pyright: ignore[reportMissingImports]  (only with the peers)

    if gpu and not torch.cuda.is_available():
        return "this torch sees no GPU"
    return None


def _placed(values: Any, problem: Problem, device: str) -> Any:
    import torch  # pyright: ignore[reportMissingImports]  (as above)

    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[problem.dtype]
    tensor = values.to(device=device, dtype=dtype)
    if problem.layout == LAST and tensor.ndim == 4:
        tensor = tensor.contiguous(memory_format=torch.channels_last)
    return tensor


def _layer(problem: Problem, weight: Any, bias: Any) -> Callable[[Any, Any, Any], Any]:
    """Of (x, weight, bias)."""
    import torch  # pyright: ignore[reportMissingImports]  (as above)

    if problem.kind != BATCH_NORM:
        return lambda x, weight, bias: torch.nn.functional.layer_norm(
            x, x.shape[1:], weight, bias, EPS
        )
    mean, variance = torch.zeros_like(bias), torch.ones_like(weight)

    def layer(x: Any, weight: Any, bias: Any) -> Any:
        y = torch.nn.functional.batch_norm(
            x, mean, variance, weight, bias, training=True, momentum=1 - MOMENTUM, eps=EPS
        )
        return torch.nn.functional.relu(y, inplace=True)  # the faster way, and a usual one

    return layer


class Torch:
    """A layer of torch with its arrays; `compiled` by torch.compile, or eager."""

    def __init__(
        self,
        problem: Problem,
        pass_: Pass,
        instances: int,
        *,
        compiled: bool,
        device: str,
        numbers: Numbers | None = None,
    ):
        import torch  # pyright: ignore[reportMissingImports]  (as above)

        self.instances = instances
        self.note = ""
        self._device = device
        self._backward = pass_ == BOTH
        channels = problem.shape[1]

        def drawn(values: NDArray[np.float32] | None, shape: Any) -> Any:
            if values is None:
                return torch.randn(shape, device=device)
            return torch.tensor(values, device=device)

        weight, bias = torch.ones(channels, device=device), torch.zeros(channels, device=device)
        if numbers is not None:
            weight, bias = drawn(numbers.weight, None), drawn(numbers.bias, None)
        if problem.kind != BATCH_NORM:
            weight, bias = (_placed(v, problem, device) for v in (weight, bias))
        given = [
            tuple(
                _placed(drawn(values, problem.shape), problem, device)
                for values in ((None, None) if numbers is None else (numbers.x, numbers.dy))
            )
            for _ in range(instances)
        ]
        self._affine = (weight.requires_grad_(), bias.requires_grad_())
        self._given = [(x.requires_grad_(), dy) for x, dy in given]
        self._layer = _layer(problem, *(v.detach() for v in self._affine))
        if compiled:
            # What was compiled for another shape counts towards a limit, from which on
            # nothing is compiled any more.
            torch.compiler.reset()
            self._layer = torch.compile(self._layer, dynamic=False)
        self._results: Any = None
        self._call = self._captured() if device == "cuda" else self._each

    def _one(self, x: Any, dy: Any) -> Any:
        import torch  # pyright: ignore[reportMissingImports]  (as above)

        if not self._backward:
            with torch.no_grad():
                return self._layer(x, *self._affine)
        y = self._layer(x, *self._affine)
        return y, torch.autograd.grad(y, (x, *self._affine), dy)

    def _each(self) -> None:
        # Kept, as JAX's are.
        self._results = [self._one(x, dy) for x, dy in self._given]

    def _captured(self) -> Callable[[], object]:
        import torch  # pyright: ignore[reportMissingImports]  (as above)

        # Whatever is set up or compiled at the first call is not for the graph.
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                self._one(*self._given[0])
        torch.cuda.current_stream().wait_stream(aside)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            # JAX's threads may call CUDA meanwhile; it is none of the graph's business.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._each()
        except RuntimeError as error:
            self.note = f"no CUDA graph: {str(error).splitlines()[0]}"
            torch.cuda.synchronize()
            return self._each
        return graph.replay

    def time(self, calls: int) -> Taken:
        return _time(self._call, calls, self._device)

    def outputs(self) -> Outputs:
        """Of the first instance, after one call."""
        self.time(1)
        y, gradients = self._results[0]
        arrays = (t.detach().float().cpu().numpy() for t in (y, *gradients))
        return Outputs(*(np.ascontiguousarray(a) for a in arrays))


class Copy:
    """So many bytes, to where they were copied before."""

    instances = 1

    def __init__(self, size: int, device: str):
        import torch  # pyright: ignore[reportMissingImports]  (as above)

        self._from = torch.randn(math.ceil(size / 4), device=device)
        self._to = torch.empty_like(self._from)
        self._device = device

    def time(self, calls: int) -> Taken:
        return _time(lambda: self._to.copy_(self._from), calls, self._device)


def _time(call: Callable[[], object], calls: int, device: str) -> Taken:
    if device == "cpu":
        return gpu_run_timing.by_the_clock(call, lambda: None, calls)
    import torch  # pyright: ignore[reportMissingImports]  (as above)

    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    taken = gpu_run_timing.by_the_clock(call, stop.record, calls)
    stop.synchronize()
    return taken._replace(seconds=start.elapsed_time(stop) / 1e3)


def forget() -> None:
    """Gives back the memory of what is no longer there."""
    import torch  # pyright: ignore[reportMissingImports]  (as above)

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
