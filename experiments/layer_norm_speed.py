"""How long layer norm takes: ratios within one process, this layer over the others."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from eqx_norm import LayerNorm

from . import benchmark_timing, results
from .benchmark_layers import PASSES, Program
from .layer_norm_layers import EPS, OURS, tensor

# [rows, values]; a transformer's, mostly.
SHAPES = ((64, 512), (1024, 256), (4096, 768), (8192, 1024))
DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}
ROUNDS = 20


class Row(NamedTuple):
    shape: tuple[int, int]
    dtype: str
    program: str  # of benchmark_layers.PASSES
    layer: str
    median: float  # of one call, in milliseconds; and 10th and 90th percentile
    low: float
    high: float


def measure(
    packages: Iterable[str],
    shapes: Iterable[tuple[int, int]] = SHAPES,
    rounds: int = ROUNDS,
    after: Callable[[], object] = lambda: None,
) -> list[Row]:
    rows, names = [], tuple(packages)
    for shape in shapes:
        for dtype in DTYPES:
            programs = _programs(shape, dtype, names)
            times = benchmark_timing.interleave(programs, rounds, after=after)
            for (program, layer), (seconds, _) in times.items():
                low, median, high = map(float, np.percentile(1e3 * seconds, (10, 50, 90)))
                rows.append(Row(shape, dtype, program, layer, median, low, high))
    return rows


def steps(packages: Iterable[str], shapes: Iterable[tuple[int, int]], rounds: int) -> int:
    """How often `after` will be called."""
    return (
        len(tuple(packages))
        * len(tuple(shapes))
        * len(DTYPES)
        * len(PASSES)
        * (benchmark_timing.WARM_UPS + rounds)
    )


def ratios(rows: Iterable[Row], to: str) -> dict[tuple[tuple[int, int], str, str], float]:
    """This layer's time over that of `to`: below 1 it is faster."""
    medians = {(row.shape, row.dtype, row.program, row.layer): row.median for row in rows}
    return {
        key[:3]: median / medians[*key[:3], to]
        for key, median in medians.items()
        if key[3] == OURS and (*key[:3], to) in medians
    }


def _programs(
    shape: tuple[int, int], dtype: str, packages: tuple[str, ...]
) -> dict[tuple[str, str], Program]:
    random = np.random.RandomState(0)
    narrow = jnp.dtype(DTYPES[dtype])
    x, dy = (random.standard_normal(shape).astype(narrow) for _ in range(2))
    makers: dict[str, Callable[[], tuple[Program, Program]]] = {
        OURS: lambda: _in_jax(LayerNorm(shape[1], EPS), x, dy),
        "Equinox": lambda: _in_jax(eqx.nn.LayerNorm(shape[1], EPS), x, dy),
        "PyTorch": lambda: _in_torch(x, dy),
    }
    needed = {OURS: "eqx_norm", "Equinox": "equinox", "PyTorch": "torch"}
    return {
        (pass_, name): program
        for name, make in makers.items()
        if needed[name] in packages
        for pass_, program in zip(PASSES, make(), strict=True)
    }


def _in_jax(layer: eqx.nn.LayerNorm, x: Any, dy: Any) -> tuple[Program, Program]:
    x, dy = jnp.asarray(x), jnp.asarray(dy)

    def apply(affine: Any, x: Any) -> Any:
        return jax.vmap(eqx.tree_at(lambda m: (m.weight, m.bias), layer, affine))(x)

    def differentiate(affine: Any, x: Any, dy: Any) -> Any:
        y, pull_back = jax.vjp(apply, affine, x)
        return y, pull_back(dy)

    affine = (layer.weight, layer.bias)
    forward = jax.jit(apply).lower(affine, x).compile()
    both = jax.jit(differentiate).lower(affine, x, dy).compile()
    return Program(lambda: forward(affine, x)), Program(lambda: both(affine, x, dy))


def _in_torch(x: Any, dy: Any) -> tuple[Program, Program]:
    import torch  # pyright: ignore[reportMissingImports]  (only with the peers)

    torch.set_num_threads(results.environment()["cores"])  # what XLA uses
    given, gradient = tensor(x).requires_grad_(), tensor(dy)
    weight = torch.ones(x.shape[1], requires_grad=True)
    bias = torch.zeros(x.shape[1], requires_grad=True)

    def layer() -> Any:
        return torch.nn.functional.layer_norm(given, x.shape[1:], weight, bias, EPS)

    def forward() -> Any:
        with torch.no_grad():
            return layer()

    def both() -> Any:
        y = layer()
        return y, torch.autograd.grad(y, (given, weight, bias), gradient)

    return Program(forward, lambda result: result), Program(both, lambda result: result)
