"""What the recipe does to programs for a GPU that is not there.

    make .venv-gpu-compile/ready && .venv-gpu-compile/bin/python -m experiments.determinism_gpu

Compiles for an H200, in two processes: as JAX does it, and after `deterministic`. A scatter
adds atomically, in the order in which its threads come, unless what it adds has been sorted
before. It exits with 1 where the recipe leaves one that adds atomically, or changes a program
of this package. Nothing runs.
"""

import json
import re
import subprocess
import sys
from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from eqx_norm import BatchNorm
from eqx_norm.determinism import deterministic

from . import command, gpu_compiler, gpu_targets, results

ATOMIC, SAME = "adds atomically", "are the same"
OURS = ("BatchNorm, ReLU", "BatchNorm, ReLU, kernels")


def scatter(table, i, values):
    return table.at[i].add(values)


def embedding(table, i):
    return jax.grad(lambda table: (table[i] ** 2).sum())(table)


def pooling(x):
    return jax.grad(lambda x: (eqx.nn.MaxPool2d(2, 2)(x) ** 2).sum())(x)


def convolution(weight, x):
    return jax.grad(lambda weight: (lax.conv(x, weight, (1, 1), "SAME") ** 2).sum())(weight)


def batch_norm(implementation):
    layer, state = eqx.nn.make_with_state(BatchNorm)(
        128, "batch", approach="batch", activation=jax.nn.relu, implementation=implementation
    )

    def forward(x):
        mapped = jax.vmap(layer, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        return mapped(x, state)[0]

    def both(x, dy):
        y, pull_back = jax.vjp(forward, x)
        return y, pull_back(dy)

    return both


def like(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def compiled() -> dict[str, str]:
    compile_ = gpu_compiler.compiler(gpu_targets.H200)
    # From here on: making a layer starts JAX, which has to know first that no GPU is there.
    indices, x = like(4096, dtype=jnp.int32), like(2048, 128)
    programs = {
        "x.at[i].add(v)": (scatter, like(1000, 16), indices, like(4096, 16)),
        "gradient of x[i]": (embedding, like(1000, 16), indices),
        "gradient of eqx.nn.MaxPool2d": (pooling, like(8, 28, 28)),
        "gradient of a convolution": (convolution, like(16, 8, 3, 3), like(64, 8, 28, 28)),
        OURS[0]: (batch_norm("xla"), x, x),
        OURS[1]: (batch_norm("pallas_triton"), x, x),
    }
    return {name: compile_(f, *arguments) for name, (f, *arguments) in programs.items()}


def _in_process(how: str) -> dict[str, str]:
    again = [sys.executable, "-m", "experiments.determinism_gpu", "--as", how]
    finished = subprocess.run(again, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise RuntimeError(finished.stderr)
    return json.loads(finished.stdout)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser(
        "determinism_gpu",
        __doc__,
        quick="the same",
        whole="the whole job",
        writes="DIR/results",
    )
    parser.add_argument("--as", dest="how", choices=("usual", "recipe"), help="(internal)")
    options = parser.parse_args(arguments)
    gpu_compiler.require_plugin(parser)
    if options.how:
        if options.how == "recipe":
            deterministic(0)
        print(json.dumps(compiled()))
        return 0
    jax.config.update("jax_platforms", "cpu")
    folder = command.folder(parser, options, whole=not options.quick) / "results"
    usual, recipe = _in_process("usual"), _in_process("recipe")
    header = ("for an H200", "usual", "the recipe", "the two programs")
    rows = [
        (name, _scatters(usual[name]), _scatters(recipe[name]), _same(usual, recipe, name))
        for name in usual
    ]
    results.write_csv(folder / "determinism_gpu.csv", header, rows)
    results.write_json(
        folder / "determinism_gpu.json",
        {"environment": results.environment("jax-cuda12-pjrt"), "compiled for": "NVIDIA H200"},
    )
    print(results.table(header, rows))
    atomic = any(row[2] == ATOMIC for row in rows)
    return int(atomic or any(row[0] in OURS and row[3] != SAME for row in rows))


def _same(usual: dict[str, str], recipe: dict[str, str], name: str) -> str:
    return SAME if _code(usual[name]) == _code(recipe[name]) else "differ"


def _scatters(hlo: str) -> str:
    if not re.search(r" scatter\(", hlo):
        return "no scatter"
    return "sorted first" if re.search(r" sort\(", hlo) else ATOMIC


def _code(hlo: str) -> str:
    """Without what says where it comes from."""
    return re.sub(r"HloModule .*|, metadata={[^}]*}|, frontend_attributes={[^}]*}", "", hlo)


if __name__ == "__main__":
    sys.exit(main())
