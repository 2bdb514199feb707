"""Makes programs to be timed of PyTorch's layers: eager and compiled, in both formats.

On a GPU several instances of a layer are one call, as in JAX: a CUDA graph, replayed. That
takes the host's part out of it, which is most of the time of a small layer that is called from
Python.

Weights are float32, as torch allows them to be for batch norm in bfloat16. Its layer norm on a
GPU wants them in the dtype of x. Arrays are where JAX has them.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import torch  # pyright: ignore[reportMissingImports]  (only with the peers)

from experiments.lab.exact import EPS, Answer, Batch
from experiments.lab.passes import MOMENTUM
from experiments.lab.peers import names, of_torch
from experiments.lab.timer import EVICTING, Program

from .cases import BOTH, INFERENCE, LAST, Problem
from .programs import How

_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def program(
    name: str, problem: Problem, pass_: str, how: How, given: Batch | None = None
) -> Program:
    """Returns the program, on random arrays or on these numbers."""
    of_torch.use_all_cores()
    device = "cuda" if jax.default_backend() == "gpu" else "cpu"
    dtype, channels = _DTYPES[problem.dtype], problem.shape[1]
    if given is None:
        weight, bias = torch.ones(channels, device=device), torch.zeros(channels, device=device)
        normal = functools.partial(torch.randn, problem.shape, device=device)
        pairs = [(normal(), normal()) for _ in range(how.instances)]
    else:
        x, dy, weight, bias = (of_torch.tensor(values, device) for values in given)
        pairs = [(x, dy)]
    images = problem.layout == LAST and len(problem.shape) == 4
    order = torch.channels_last if images else torch.contiguous_format
    arrays = [[v.to(dtype, memory_format=order) for v in pair] for pair in pairs]
    layer = _layer(problem, pass_, weight, bias)
    affine = [v.to(dtype) if problem.rows else v for v in (weight, bias)]
    for values in (*affine, *(x for x, _ in arrays)):
        values.requires_grad_()
    if name == names.TORCH_COMPILED:
        # What was compiled for another shape counts towards a limit, from which on nothing is
        # compiled any more.
        torch.compiler.reset()
        layer = torch.compile(layer, dynamic=False)

    def one(x: Any, dy: Any) -> Any:
        if pass_ != BOTH:
            with torch.no_grad():
                return layer(x, *affine)
        y = layer(x, *affine)
        return y, torch.autograd.grad(y, (x, *affine), dy)

    def each() -> list[Any]:
        return [one(x, dy) for x, dy in arrays]

    if device == "cuda":
        return Program(_captured(each), lambda _: torch.cuda.synchronize(), len(arrays))
    return Program(each, lambda results: results, len(arrays), evict=_evictor())


@functools.cache
def _evictor() -> Callable[[], object]:
    # In a call that follows one of XLA's, torch's threads may wait for a core for 40 ms.
    return torch.ones(EVICTING).neg_


def answer(name: str, problem: Problem, given: Batch, how: How) -> Answer:
    """Returns what the layer gives for these numbers, forward and backward."""
    made = program(name, problem, BOTH, how, given)
    ((y, gradients),) = made.call()
    y, *gradients = map(of_torch.array, (y, *gradients))
    return Answer(y, None, *gradients)


def _layer(
    problem: Problem, pass_: str, weight: Any, bias: Any
) -> Callable[[Any, Any, Any], Any]:
    """Returns the layer as a function of x, weight and bias."""
    if problem.rows:
        return lambda x, weight, bias: of_torch.layer_norm(x, weight, bias, eps=EPS)
    how = {"momentum": MOMENTUM, "eps": EPS, "training": pass_ != INFERENCE}
    memory = torch.zeros_like(bias), torch.ones_like(weight)

    def layer(x: Any, weight: Any, bias: Any) -> Any:
        y = of_torch.batch_norm(x, weight, bias, memory, **how)
        return torch.nn.functional.relu(y, inplace=True)  # the faster way, and a usual one

    return layer


def _captured(each: Callable[[], Any]) -> Callable[[], Any]:
    """Returns a call that replays all of it as a CUDA graph."""
    # Whatever is set up or compiled at the first call is not for the graph.
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            each()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    # JAX's threads may call CUDA meanwhile; it is none of the graph's business.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = each()

    def replay() -> Any:
        graph.replay()
        return results

    return replay
