"""Compares derivatives inside and outside of `jax.shard_map` with those of one device.

`python -m tests.operation.over_mesh` is a program of its own, because the number of CPU devices
is fixed when JAX starts. It prints, as JSON, the largest error of each case and transformation,
in units of the largest value.
"""

import functools
import json
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from eqx_norm import LayerNorm
from eqx_norm._normalise import primitives
from eqx_norm._normalise.arithmetic import Arithmetic
from eqx_norm._normalise.primitives import Static, bind
from tests.helpers import f32, make, over_batch

DEVICES = 8
N, C, L = 16, 2, 3
WHOLE, SPLIT = P(), P("devices")
RANDOM = np.random.default_rng(0)


# What is tested are types and sums: they need no program that took long to compile.
compiled = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


class Case(NamedTuple):
    """Holds a function to call on all examples, or inside `shard_map` on those of a device."""

    f: Callable[..., Any]
    arrays: tuple[jax.Array, ...]
    out: P = SPLIT  # WHOLE where `f` sums over examples, and so over devices

    @property
    def specs(self) -> tuple[P, ...]:
        """Returns that examples are split over devices, and vectors the same on all."""
        return tuple(SPLIT if array.shape[:1] == (N,) else WHOLE for array in self.arrays)


def normal(*shape: int) -> jax.Array:
    return f32(RANDOM.standard_normal(shape))


def silu_and_more(u: jax.Array) -> jax.Array:
    return jax.nn.silu(u) + jnp.cos(u)


def of_primitives() -> dict[str, Case]:
    """Returns each pass over x, in all its operands; vectors are the same on all devices."""
    full, column = (N, C, L), (1, C, 1)
    g, x = normal(*full), normal(*full)
    mean, rest, a, b, da, db = (normal(*column) for _ in range(6))
    static = Static(1, Arithmetic(), activation=silu_and_more, dtype=jnp.dtype("float32"))
    inner = a, b, x, mean, rest

    def of(primitive: Any, **parameters: Any) -> Callable[..., Any]:
        return lambda *arrays: bind(primitive, *arrays, static=static, **parameters)

    sums, vjp = (of(p, shape=column) for p in (primitives.SUMS, primitives.ACTIVATED_VJP))
    return {
        "sums": Case(sums, (g, x, mean, rest), WHOLE),
        "affine": Case(of(primitives.AFFINE), inner),
        "activated": Case(
            lambda a, b, x, *mean: of(primitives.ACTIVATED)(a, b, x, x, *mean), inner
        ),
        "activation_jvp": Case(of(primitives.ACTIVATION_JVP), (g, *inner)),
        "activated_jvp": Case(of(primitives.ACTIVATED_JVP), (da, db, g, *inner)),
        "activated_vjp, sums": Case(lambda *arrays: vjp(*arrays)[:2], (g, *inner), WHOLE),
        "activated_vjp": Case(lambda *arrays: vjp(*arrays)[2], (g, *inner)),
        "recompute_barrier": Case(
            lambda x, mean: [x * primitives.RECOMPUTE_BARRIER.bind(mean)[0]], (x, mean)
        ),
    }


def of_layers() -> dict[str, Case]:
    """Returns layers: x is split over devices, weight and bias are the same on all."""

    def layer_norm(dtype: Any = jnp.float32, **how: Any) -> Case:
        layer = LayerNorm(5, **how)
        x = normal(N, 5).astype(dtype)
        arrays, restore = jax.tree.flatten(eqx.filter(layer, eqx.is_inexact_array))

        def f(x: jax.Array, *arrays: jax.Array) -> jax.Array:
            model = eqx.combine(jax.tree.unflatten(restore, arrays), layer)
            return jax.vmap(model)(x)

        moved = tuple(a + 0.1 * normal(*a.shape) for a in arrays)
        return Case(f, (x, *moved))

    def batch_norm(dtype: Any = jnp.float32, mask: Any = None, **how: Any) -> Case:
        layer, state = make(C, "batch", approach="batch", inference=True, **how)
        state = jax.tree.map(lambda a: a + 0.5, state)

        def f(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
            model = eqx.tree_at(lambda m: (m.weight, m.bias), layer, (weight, bias))
            return jax.vmap(lambda x: model(x, state, mask=mask)[0])(x)

        return Case(f, (normal(N, C, L).astype(dtype), normal(C), normal(C)))

    def training(approach: str, mask: Any = None, **how: Any) -> Case:
        def f(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
            names = ("batch", *jax.sharding.get_abstract_mesh().manual_axes)
            layer, state = make(C, names, approach=approach, **how)
            model = eqx.tree_at(lambda m: (m.weight, m.bias), layer, (weight, bias))
            return over_batch(lambda x, state: model(x, state, mask=mask))(x, state)[0]

        return Case(f, (normal(N, C, L), normal(C), normal(C)))

    half = jnp.bfloat16
    return {
        "LayerNorm": layer_norm(),
        "LayerNorm, no bias": layer_norm(use_bias=False),
        "LayerNorm, no weight": layer_norm(use_weight=False, use_bias=False),
        "LayerNorm, silu": layer_norm(activation=jax.nn.silu),
        "LayerNorm, PReLU": layer_norm(activation=eqx.nn.PReLU(0.3)),
        "LayerNorm, bfloat16": layer_norm(half),
        "training": training("smooth_start"),
        "training, silu": training("batch", activation=jax.nn.silu),
        "training, PReLU, mask": training(
            "variance_clip", jnp.array([True, False, True]), activation=eqx.nn.PReLU(0.3)
        ),
        "inference": batch_norm(),
        "inference, PReLU": batch_norm(activation=eqx.nn.PReLU(0.3)),
        "inference, mask": batch_norm(mask=jnp.array([True, False, True])),
        "inference, bfloat16, silu": batch_norm(half, activation=jax.nn.silu),
    }


CASES = of_primitives() | of_layers()

# --- What is done to each.


def loss_of(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arrays: sum(
        jnp.sum(jnp.sin(out.astype(jnp.float32))) for out in jax.tree.leaves(f(*arrays))
    )


def gradient(f: Callable[..., Any], arrays: Any, tangents: Any) -> Any:
    del tangents
    return jax.grad(loss_of(f), tuple(range(len(arrays))))(*arrays)


def directional(f: Callable[..., Any], arrays: Any, tangents: Any) -> Any:
    return jax.jvp(f, arrays, tangents)[1]


def transposed(f: Callable[..., Any], arrays: Any, tangents: Any) -> Any:
    """Returns the linear transpose of the derivative, at its own result."""
    y, linear = jax.linearize(f, *arrays)
    del tangents
    return jax.linear_transpose(linear, *arrays)(y)


def slope_of_gradient(f: Callable[..., Any], arrays: Any, tangents: Any) -> Any:
    of_arrays = functools.partial(gradient, f, tangents=None)
    return jax.jvp(lambda *arrays: of_arrays(arrays), arrays, tangents)[1]


def gradient_of_gradient(f: Callable[..., Any], arrays: Any, tangents: Any) -> Any:
    del tangents
    return gradient(lambda *arrays: gradient(f, arrays, None), arrays, None)


TRANSFORMS = (gradient, directional, transposed, slope_of_gradient, gradient_of_gradient)


def every(f: Callable[..., Any], arrays: Any, tangents: Any) -> dict[str, Any]:
    return {t.__name__: t(f, arrays, tangents) for t in TRANSFORMS}


def of_each_device(f: Callable[..., Any], arrays: Any, tangents: Any) -> dict[str, Any]:
    """Returns all but the gradient of a gradient: what the latter is of are sums over devices
    already, and each device would count them as its own."""
    return {t.__name__: t(f, arrays, tangents) for t in TRANSFORMS[:-1]}


def found(case: Case) -> dict[str, float]:
    mesh = jax.make_mesh((DEVICES,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))
    tangents = tuple(normal(*a.shape).astype(a.dtype) for a in case.arrays)

    def local(*arrays: Any) -> Any:
        y = case.f(*arrays)
        return jax.lax.psum(y, "devices") if case.out == WHOLE else y

    specs = {t.__name__: case.specs for t in TRANSFORMS[:-1]} | {"directional": case.out}
    outside = jax.shard_map(local, mesh=mesh, in_specs=case.specs, out_specs=case.out)
    inside = jax.shard_map(
        functools.partial(of_each_device, local),
        mesh=mesh,
        in_specs=(case.specs, case.specs),
        out_specs=specs,
    )
    one, over_mesh, on_each = (
        compiled(f)(case.arrays, tangents)
        for f in (functools.partial(every, case.f), functools.partial(every, outside), inside)
    )
    return {
        f"{name}, {way}": error(result, one[name])
        for way, results in (("outside", over_mesh), ("inside", on_each))
        for name, result in results.items()
    }


def error(ours: Any, right: Any) -> float:
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(right), strict=True)
    return max(
        float(
            np.max(np.abs(np.subtract(a, b, dtype=np.float64))) / np.max(np.abs(b), initial=1)
        )
        for a, b in pairs
    )


def main() -> None:
    json.dump({name: found(case) for name, case in CASES.items()}, sys.stdout)


if __name__ == "__main__":
    main()
