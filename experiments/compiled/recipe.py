"""Compares programs with and without `eqx_norm.determinism.deterministic`.

A scatter adds atomically, in the order in which its threads come, unless what it adds has been
sorted before.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
from jax import lax

from eqx_norm.determinism import deterministic
from experiments.lab.passes import BOTH
from experiments.lab.peers import names

from . import compiler
from .cases import BATCH_NORM, Case, program

ATOMIC, SORTED, NO_SCATTER = "adds atomically", "sorted first", "no scatter"
OURS = {"BatchNorm, ReLU": names.OURS_XLA, "BatchNorm, ReLU, kernel": names.OURS_PALLAS}


class Step(NamedTuple):
    """Says how a program adds, as JAX compiles it and with the recipe."""

    program: str
    usual: str
    recipe: str
    same: bool  # whether the two programs are


def compiled(recipe: bool) -> dict[str, str]:
    """Returns the optimised HLO of each program for an H200.

    The recipe sets what JAX reads when it starts: call this in a process of its own.
    """
    if recipe:
        deterministic(0)
    compile_ = compiler.compiler("H200")
    table, indices, values = _like(1000, 16), _like(4096, dtype="int32"), _like(4096, 16)
    pool = eqx.nn.MaxPool2d(2, 2)
    programs: dict[str, Any] = {
        "x.at[i].add(v)": (lambda x, i, v: x.at[i].add(v), (table, indices, values)),
        "gradient of x[i]": (_gradient(lambda x, i: x[i]), (table, indices)),
        "gradient of eqx.nn.MaxPool2d": (_gradient(pool), (_like(8, 28, 28),)),
        "gradient of a convolution": (
            _gradient(lambda kernel, x: lax.conv(x, kernel, (1, 1), "SAME")),
            (_like(16, 8, 3, 3), _like(64, 8, 28, 28)),
        ),
    }
    for name, implementation in OURS.items():
        case = Case("H200", BATCH_NORM, (2048, 128), "float32", BOTH, implementation)
        programs[name] = program(case)
    return {name: compile_(f, *arguments) for name, (f, arguments) in programs.items()}


def compare(usual: dict[str, str], recipe: dict[str, str]) -> list[Step]:
    """Returns how each program adds, from its HLO as usual and with the recipe."""
    return [
        Step(name, _adds(hlo), _adds(recipe[name]), _stripped(hlo) == _stripped(recipe[name]))
        for name, hlo in usual.items()
    ]


def _adds(hlo: str) -> str:
    if " scatter(" not in hlo:
        return NO_SCATTER
    return SORTED if " sort(" in hlo else ATOMIC


def _stripped(hlo: str) -> str:
    """Returns a program without what says where it comes from."""
    return re.sub(r"HloModule .*|, metadata={[^}]*}|, frontend_attributes={[^}]*}", "", hlo)


def _gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.grad(lambda *arguments: (function(*arguments) ** 2).sum())


def _like(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)
