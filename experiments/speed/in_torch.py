"""Makes programs to be timed of PyTorch's layers: eager and compiled, in both formats.

On a GPU several instances of a layer are one call, as in JAX: a CUDA graph, replayed. That
takes the host's part out of it, which is most of the time of a small layer that is called from
Python. Where a graph cannot be captured, the layer is called as it is.

Weights are float32, as torch allows them to be for batch norm in bfloat16. Its layer norm on a
GPU wants them in the dtype of x.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]  (only with the peers)
from numpy.typing import NDArray

from experiments.lab.peers import names, of_torch
from experiments.lab.timer import Program

from .agreement import Numbers, Outputs
from .cases import FORWARD, LAST, Pass, Problem
from .programs import EPS, MOMENTUM

_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def program(
    name: str,
    problem: Problem,
    pass_: Pass,
    instances: int,
    device: str,
    numbers: Numbers | None = None,
) -> Program:
    """Returns the program, on random arrays or on these numbers."""
    of_torch.use_all_cores()

    def placed(values: NDArray[np.float32] | None) -> Any:
        if values is None:
            tensor = torch.randn(problem.shape, device=device)
        else:
            tensor = torch.tensor(values, device=device)
        tensor = tensor.to(_DTYPES[problem.dtype])
        if problem.layout == LAST and tensor.ndim == 4:
            tensor = tensor.contiguous(memory_format=torch.channels_last)
        return tensor

    channels = problem.shape[1]
    weight, bias = torch.ones(channels, device=device), torch.zeros(channels, device=device)
    if numbers is not None:
        weight, bias = (torch.tensor(a, device=device) for a in (numbers.weight, numbers.bias))
    if problem.rows:
        weight, bias = (v.to(_DTYPES[problem.dtype]) for v in (weight, bias))
    affine = weight.requires_grad_(), bias.requires_grad_()
    given = (None, None) if numbers is None else (numbers.x, numbers.dy)
    arrays = [tuple(map(placed, given)) for _ in range(instances)]
    for x, _ in arrays:
        x.requires_grad_()
    layer = _layer(problem, *(parameter.detach() for parameter in affine))
    if name == names.TORCH_COMPILED:
        # What was compiled for another shape counts towards a limit, from which on nothing is
        # compiled any more.
        torch.compiler.reset()
        layer = torch.compile(layer, dynamic=False)

    def one(x: Any, dy: Any) -> Any:
        if pass_ == FORWARD:
            with torch.no_grad():
                return layer(x, *affine)
        y = layer(x, *affine)
        return y, torch.autograd.grad(y, (x, *affine), dy)

    def each() -> list[Any]:
        return [one(x, dy) for x, dy in arrays]

    if device == "cpu":
        return Program(each, lambda results: results, instances)
    call, note = _captured(each, lambda: one(*arrays[0]))
    return Program(call, _synchronised, instances, note)


def outputs(results: list[Any]) -> Outputs:
    """Returns what the first instance gave."""
    y, gradients = results[0]
    return Outputs(*(np.ascontiguousarray(of_torch.array(t)) for t in (y, *gradients)))


def copy(size: int, device: str) -> Program:
    """Returns a copy of so many bytes, to where they were copied before."""
    source = torch.randn(math.ceil(size / 4), device=device)
    target = torch.empty_like(source)
    wait = _synchronised if device == "cuda" else lambda results: results
    return Program(lambda: target.copy_(source), wait)


def forget() -> None:
    """Gives back the memory of what is no longer there."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _layer(problem: Problem, weight: Any, bias: Any) -> Callable[[Any, Any, Any], Any]:
    """Returns the layer as a function of x, weight and bias."""
    if problem.rows:
        return lambda x, weight, bias: of_torch.layer_norm(x, weight, bias, eps=EPS)
    memory = torch.zeros_like(bias), torch.ones_like(weight)

    def layer(x: Any, weight: Any, bias: Any) -> Any:
        y = of_torch.batch_norm(x, weight, bias, memory, momentum=MOMENTUM, eps=EPS)
        return torch.nn.functional.relu(y, inplace=True)  # the faster way, and a usual one

    return layer


def _captured(
    each: Callable[[], Any], once: Callable[[], Any]
) -> tuple[Callable[[], Any], str]:
    """Returns a call that replays all of it, and a note where that cannot be."""
    # Whatever is set up or compiled at the first call is not for the graph.
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            once()
    torch.cuda.current_stream().wait_stream(aside)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        # JAX's threads may call CUDA meanwhile; it is none of the graph's business.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            results = each()
    except RuntimeError as error:
        torch.cuda.synchronize()
        return each, f"no CUDA graph: {str(error).splitlines()[0]}"

    def replay() -> Any:
        graph.replay()
        return results

    return replay, ""


def _synchronised(results: Any) -> Any:
    torch.cuda.synchronize()
    return results
