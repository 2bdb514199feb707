"""Measures how long programs take to compile, and what they need and move by XLA's count."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax

from experiments.lab.passes import function

from . import cases, networks, programs
from .rows import Row

# Makes a fresh function, of which JAX has traced nothing, and its arguments or their shapes.
Make = Callable[[], tuple[Callable[..., Any], Sequence[Any]]]


class Compiled(NamedTuple):
    """Holds seconds of the processor, and bytes."""

    trace: float
    lower: float
    in_all: float
    temporaries: int
    moved: float


def compiled(make: Make) -> Compiled:
    """Compiles what is made.

    What JAX has traced of others before is forgotten, so that nobody gains from the order.
    What else the machine does is no time of this process.
    """
    jax.clear_caches()
    function, arguments = make()
    start = time.process_time()
    traced = jax.jit(function).trace(*arguments)
    is_traced = time.process_time()
    lowered = traced.lower()
    is_lowered = time.process_time()
    program = lowered.compile()
    is_compiled = time.process_time()
    memory, costs = program.memory_analysis(), program.cost_analysis()
    if memory is None or costs is None:
        raise RuntimeError(f"{jax.default_backend()} does not tell what memory programs need")
    return Compiled(
        is_traced - start,
        is_lowered - is_traced,
        is_compiled - start,
        memory.temp_size_in_bytes,
        costs["bytes accessed"],
    )


def layer(name: str, row: Row) -> Make:
    """Returns what makes the layer of that name, on the row's array."""
    problem = row.problem

    def make() -> tuple[Callable[..., Any], Sequence[Any]]:
        made = programs.layer(name, problem)
        shape = programs.given_shape(name, problem)
        x = jax.ShapeDtypeStruct(shape, cases.DTYPES[problem.dtype])
        arguments = programs.unit_affine(problem.shape[1]), made.memory, x, x
        return function(made, row.program), arguments

    return make


def network(name: str, row: Row) -> Make:
    """Returns what makes the training step of the row's network, with the norm of that name."""
    made, shape = networks.NETWORKS[row.program]
    return lambda: networks.training_step(made, name, shape)


def in_turns(row: Row, made: Mapping[str, Make], rounds: int) -> list[Row]:
    """Compiles all in every round; of the seconds the median counts."""
    taken: dict[str, list[Compiled]] = {name: [] for name in made}
    for _ in range(rounds):
        for name, make in made.items():
            taken[name].append(compiled(make))
    return [
        replace(
            row,
            peer=name,
            temporaries=several[0].temporaries / row.bytes,
            trace_seconds=statistics.median(each.trace for each in several),
            lower_seconds=statistics.median(each.lower for each in several),
            compile_seconds=statistics.median(each.in_all for each in several),
        )
        for name, several in taken.items()
    ]


def moved(row: Row, blocks: int) -> list[Row]:
    """Counts the bytes that each of so many pre-activation blocks moves, over those of x."""
    net = partial(networks.pre_activation, channels=row.shape[1], blocks=blocks)
    made = compiled(lambda: networks.training_step(net, row.peer, row.shape))
    return [replace(row, units=made.moved / blocks / row.bytes)]
