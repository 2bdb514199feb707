"""Compares random uses of the layers with their formulas in NumPy's extended precision.

A case, drawn from a seed, is a layer and its settings, shape, dtype, data, mask, some steps of
training and inference, a derivative, and JAX's transformations of it all. After each step y, the
derivative and the memory are held to bounds that follow from arithmetic. The formulas share no
code with the package; their derivatives are exact, by numbers with infinitesimal parts.

A failure is printed with the smallest case found that fails likewise, for --case: fields that it
does not give have the simplest values. The exit status is 1 if a case fails. For example

    make fuzz SEED=0 CASES=200              # cases 0 to 199
    python -m tests.fuzz --seed 17          # case 17 alone
    python -m tests.fuzz --case '{"layer": "LayerNorm", "data": "outlier", "of": "vjp"}'
"""

import argparse
import json
import operator
import os
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

from eqx_norm import models
from eqx_norm import strategies as S  # noqa: N812
from tests.compiling import XLA_FLAGS
from tests.exact import half_ulp
from tests.helpers import make
from tests.layers.norms import EXAMPLE_NORMS, GROUPS, NORMS, with_parameters

os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=8 {XLA_FLAGS}"
LD = np.longdouble
ROWS = ("LayerNorm", "RMSNorm")  # have a weight, and a mask, for each value
STRATEGIES: dict[str, Callable[[float], Any]] = {  # of the momentum
    "batch": S.Batch,
    "ema": S.Ema,
    "adam": S.Adam,
    "smooth_start": S.SmoothStart,
    "renorm": lambda m: S.Renorm(m, r_max=1.5, d_max=0.5),
    "clip": lambda m: S.VarianceClip(S.Ema(m), ratio=1.5, start=1),
    "average": lambda _: S.Average(),
    "cumulative": lambda _: S.Cumulative(),
    "accumulated": lambda m: S.Accumulated(S.Adam(m), every=2),
    "frozen": lambda m: S.Frozen(S.Batch(m)),
}
SIZES = {"offset": (1e3, 1.0), "constant": (1e3, 0.0), "tiny": (1e-20, 1e-20)}
SIZES |= {"huge": (1e16, 1e16), "denormal": (1e-41, 1e-41)}  # of mean and deviation; else 1
DATA = ["normal", "normal", *SIZES, "outlier", "nonfinite"]

# --- Cases.


def one_of(*values: Any) -> Any:
    return field(default=values[0], metadata={"values": values})


@dataclass(frozen=True)
class Case:
    """Describes a use of a layer: a field's first value is the simplest."""

    seed: int = 0  # of the data
    layer: str = one_of(*["BatchNorm"] * 6, *EXAMPLE_NORMS)
    approach: str = one_of(*STRATEGIES)
    momentum: float = one_of(0.9, 0.99, 0.5, 0.3, 0.01, 0.9999)
    unbiased: bool = one_of(False, False, True)
    channels: int = one_of(1, 2, 3)  # of GroupNorm in each group
    spatial: tuple[int, ...] = ()
    # Mapped axes, outermost first. A batch norm takes moments over "batch" and remembers over
    # "memory", too; each index of "apart" has its own state.
    axes: tuple[tuple[str, int], ...] = (("batch", 3),)
    behind: bool = one_of(False, False, True)  # the mapped axes of x and y, all others
    devices: str = one_of("", "", "checked", "unchecked")  # (check_vma) along the first axis
    x64: bool = one_of(*[False] * 5, True)
    dtype: str = one_of(*["float32"] * 4, "bfloat16", "float16", "complex64", "float64")
    narrow: bool = one_of(False, True)  # weights have the dtype of x; else float32 or better
    eps: float = one_of(1e-5, 1e-5, 1e-3, 1e-12)
    weight_offset: float = one_of(0.0, 0.0, 1.0, -2.5)
    activation: str = one_of("", "", "", "relu", "prelu", "silu", "gelu", "tanh")
    weights: str = one_of("", "own", "own", "channel", "value")  # the last two: of the call
    mask: str = one_of("", "", "", "example", "row", "position")
    shared: bool = one_of(False, False, True)  # all examples have the same weights and mask
    data: str = one_of(*DATA)
    steps: tuple[str, ...] = ("train",)
    traced: bool = one_of(False, False, True)  # the flag inference=
    of: str = one_of("", "vjp", "vjp", "jvp", "jvp of vjp", "vjp of vjp")  # the derivative
    inner: tuple[str, ...] = ()  # transformations of one example's function, innermost first
    outer: tuple[str, ...] = ()  # of that of all examples
    around: tuple[str, ...] = ("jit",)  # of its derivative


# A field, when it does not go together with the others, and its value then.
RULES: list[tuple[str, Callable[[Case], Any], Any]] = [
    ("unbiased", lambda c: learnt(c) < 2, False),
    ("devices", lambda c: not c.axes or c.axes[0][1] not in (2, 4, 8), ""),
    ("behind", lambda c: c.devices, False),
    ("around", lambda c: c.devices and "export" in c.around, ("jit",)),  # loads on one device
    ("x64", lambda c: c.dtype == "float64", True),
    ("of", lambda c: "16" in c.dtype and " of " in c.of, "vjp"),  # else rounded in between
    ("activation", lambda c: c.dtype == "complex64", ""),
    # Where XLA's derivative of these functions overflows.
    ("activation", lambda c: c.data in LARGE and c.activation in SMOOTH, "relu"),
]
LARGE, SMOOTH = ("offset", "outlier", "huge"), ("silu", "gelu", "tanh")
MOST = {"": 2000, "jvp": 2000, "vjp": 120}  # values of x; for second derivatives 60


def learnt(case: Case) -> int:
    """Returns how many values of a channel the memory learns from in a step."""
    return int(np.prod([*case.spatial, *(n for role, n in case.axes if role != "apart")]))


def feasible(case: Case) -> Case:
    if case.layer != "BatchNorm":
        case = replace(case, approach="batch", axes=tuple(("apart", n) for _, n in case.axes))
    for name, is_wrong, value in RULES:
        if is_wrong(case):
            case = replace(case, **{name: value})
    return case


def draw(seed: int) -> Case:
    r = random.Random(seed)

    def some(values: Any, *counts: int) -> tuple[Any, ...]:
        return tuple(r.choice(values) for _ in range(r.choice(counts)))

    drawn = {f.name: r.choice(f.metadata["values"]) for f in fields(Case) if f.metadata}
    case = Case(seed, **drawn, steps=some(["train", "train", "infer"], 1, 2, 3, 5))
    case = replace(case, inner=some(INNER, 0, 0, 1, 2), outer=some(INNER, 0, 0, 1))
    case = replace(case, around=(*some(INNER, 0, 0, 1), *some(["jit", "export"], 0, 1, 1, 1)))
    roles, size = ["batch", "batch", "memory", "apart"], np.inf
    while size > MOST.get(case.of, 60):
        axes = some([(role, n) for role in roles for n in (2, 3, 4, 8)], 1, 1, 2, 3)
        case = feasible(replace(case, axes=axes, spatial=some([1, 2, 3, 5, 7, 16], 0, 1, 2)))
        size = np.prod([*example(case), *(n for _, n in axes)])
    return case


def example(case: Case) -> tuple[int, ...]:
    """Returns the shape of one example."""
    return case.channels * (GROUPS if case.layer == "GroupNorm" else 1), *case.spatial


# --- Numbers a + b s + c t + d st with s^2 = t^2 = 0, as arrays (4, directions s, ...). So
# f(x + v s + w t) has the derivatives of f at x along v, along w and along both.


def number(a: Any, s: Any = 0, t: Any = 0) -> Any:
    return np.stack(np.broadcast_arrays(np.asarray(a)[None], s, t, LD(0)))


def constant(a: Any, like: Any) -> Any:
    return number(np.full(value(like).shape, LD(a)))


def value(a: Any) -> Any:
    return a[0, 0]


def times(a: Any, b: Any) -> Any:
    both = a[0] * b[3] + a[3] * b[0] + a[1] * b[2] + a[2] * b[1]
    return np.stack([a[0] * b[0], *(a[0] * b[i] + a[i] * b[0] for i in (1, 2)), both])


def applied(f: Any, slope: Any, bend: Any) -> Callable[[Any], Any]:
    """Returns f of a number; its first and second derivatives are `slope` and `bend`."""

    def call(a: Any) -> Any:
        first = slope(a[0])
        return np.stack([f(a[0]), first * a[1], first * a[2], first * a[3] + bend(a[0]) * a[1] * a[2]])

    return call


rsqrt = applied(lambda a: a ** LD(-0.5), lambda a: a ** LD(-1.5) / -2, lambda a: a ** LD(-2.5) * 0.75)
tanh = applied(
    np.tanh, lambda a: 1 - np.tanh(a) ** 2, lambda a: -2 * np.tanh(a) * (1 - np.tanh(a) ** 2)
)
C, D = LD(0.044715), np.sqrt(2 / LD(np.pi))
# In JAX, and of u and the slope of a PReLU.
ACTIVATIONS: dict[str, tuple[Any, Callable[[Any, Any], Any]]] = {
    "": (None, lambda u, _: u),
    "relu": (jax.nn.relu, lambda u, _: np.where(u[0] <= 0, 0, u)),
    "prelu": (eqx.nn.PReLU(0.25), lambda u, slope: np.where(u[0] < 0, times(slope, u), u)),
    "silu": (jax.nn.silu, lambda u, _: (u + times(u, tanh(u / 2))) / 2),
    "gelu": (
        jax.nn.gelu,
        lambda u, _: (u + times(u, tanh(D * (u + C * times(u, times(u, u)))))) / 2,
    ),
    "tanh": (jnp.tanh, lambda u, _: tanh(u)),
}

# --- The formulas. Arrays have all mapped axes, then (groups, channels in a group, *spatial),
# of size 1 where they do not differ.


class Moments(NamedTuple):
    n: Any  # of values; in a running average of batches
    mean: Any  # a number, as the variance
    variance: Any

    def moved(self, to: "Moments", share: Any, between: Any = 0) -> "Moments":
        """Returns a share of `to` and the rest of these, unless they are of nothing; `between`:
        of the union, with the variance between both."""
        pairs = zip(self[1:], to[1:], strict=True)
        mean, variance = (np.where(self.n == 0, number(value(b)), a) for a, b in pairs)
        apart = times(to.mean - mean, (to.mean - mean).conj()).real * share * (1 - share)
        variance = variance + share * (to.variance - variance) + between * apart
        n = self.n + (to.n if between else 1)
        return Moments(n, mean + share * (to.mean - mean), variance)


class Memory(NamedTuple):
    running: Moments
    pending: Moments  # of the micro-batches so far
    waiting: Any  # their number


def moments(x: Any, mask: Any, over: tuple[int, ...], centred: bool = True) -> Moments:
    n = np.broadcast_to(mask, x.shape[2:]).sum(over, LD, keepdims=True)
    first = np.where(mask, value(x), np.inf).min(over, keepdims=True)
    x = x - number(np.where((n > 0) & centred, first, 0))  # from where constants are exact

    def mean(a: Any) -> Any:
        return np.where(mask, a, 0).sum(over, keepdims=True) / np.maximum(n, 1)

    shift = np.where(centred, mean(x), 0)
    variance = mean(times(x - shift, (x - shift).conj()).real) + number((n == 0) * LD(1))
    return Moments(n, shift + number(np.where((n > 0) & centred, first, 0)), variance)


def pooled(batch: Moments, over: tuple[int, ...]) -> Moments:
    """Returns the moments of the union of batches."""
    n = batch.n.sum(over, keepdims=True)
    first = np.where(batch.n > 0, value(batch.mean), -np.inf).max(over, keepdims=True)
    first, share = number(np.where(n > 0, first, 0)), batch.n / np.maximum(n, 1)

    def mean(a: Any) -> Any:
        return np.where(batch.n > 0, share * a, 0).sum(over, keepdims=True)

    centre = first + mean(batch.mean - first)
    return Moments(n, centre, mean(batch.variance + np.abs(batch.mean - centre) ** 2))


def update(case: Case, memory: Memory, batch: Moments) -> tuple[Moments, Memory]:
    """Returns the moments that normalise a batch, and the memory after it."""
    kind, m, eps = case.approach, LD(case.momentum), LD(case.eps)
    (running, pending, waiting), k = memory, memory.running.n
    if kind == "clip":
        g, now = value(running.variance), value(batch.variance)
        whole = g.mean(-2 - len(case.spatial), keepdims=True)  # of all channels
        low, high = g / LD(1.5), LD(1.5) * (g + whole)
        is_free = (k < 1) | (whole <= eps) | ((now >= low) & (now <= high))
        clipped = np.where(is_free, batch.variance, number(np.clip(now, low, high)))
        batch = batch._replace(variance=clipped)
    share = (1 - m) / (1 - m ** (k + 1))
    if kind in ("ema", "clip"):
        share = np.where(k == 0, 1, 1 - m)
    elif kind in ("average", "cumulative"):
        share = 1 / (k + 1) if kind == "average" else batch.n / np.maximum(k + batch.n, 1)

    def learn(batch: Moments) -> Moments:
        ratio = 1 if kind == "cumulative" else batch.n / np.maximum(batch.n - case.unbiased, 1)
        remembered = batch._replace(variance=batch.variance * ratio)
        return running.moved(remembered, share, between=kind == "cumulative")

    after, used = learn(batch), batch
    if kind in ("ema", "clip", "adam", "accumulated"):
        used = after
    elif kind == "smooth_start":
        used = batch._replace(n=batch.n + 1).moved(after, 1 - m ** (k + 1))
    elif kind == "renorm":
        square = batch.variance + constant(eps, batch.variance)
        of_batch, sigma = times(square, rsqrt(square)), np.sqrt(value(running.variance) + eps)
        r = np.where(k == 0, 1, np.clip(value(of_batch) / sigma, 1 / LD(1.5), 1.5))
        d = np.where(k == 0, 0, value(batch.mean - running.mean) / sigma)
        d = d * np.minimum(1, 0.5 / np.maximum(np.abs(d), 0.5))
        used = Moments(batch.n, batch.mean - of_batch * (d / r), square / r**2 - constant(eps, square))
    if kind != "accumulated":
        return used, memory._replace(running=after)
    whole = pending.moved(batch, batch.n / np.maximum(pending.n + batch.n, 1), between=True)
    empty = jax.tree.map(np.zeros_like, pending)
    return used, chosen(
        waiting == 1,
        Memory(learn(whole), empty, 0 * waiting),
        Memory(running, whole, waiting + 1),
    )


def chosen(condition: Any, one: Any, other: Any) -> Any:
    return jax.tree.map(lambda a, b: np.where(condition, a, b), one, other)


class Oracle:
    """Computes a case by the formulas of docs/which_approach.md."""

    def __init__(self, case: Case):
        self.case, spatial = case, len(case.spatial)
        own = (-1 - spatial,) if "axis=0" in case.layer else range(-1 - spatial, 0)
        self.over, self.channels = (*self.axes("batch"), *own), tuple(range(-2 - spatial, 0))
        shape = [n if role == "apart" else 1 for role, n in case.axes]
        zero = np.zeros((*shape, case.channels, *[1] * (1 + spatial)), LD)  # of a batch norm
        empty = Moments(zero, number(zero), number(zero))
        self.memory = Memory(empty._replace(variance=number(zero + 1)), empty, zero)
        self.accepted = self.rejected = 0 * self.in_each_channel(zero)

    def axes(self, name: str) -> tuple[int, ...]:
        first = -2 - len(self.case.spatial) - len(self.case.axes)
        return tuple(first + i for i, (role, _) in enumerate(self.case.axes) if role == name)

    def in_each_channel(self, array: Any) -> Any:
        return array.all(self.channels, keepdims=True)

    def layout(self, array: Any) -> Any:
        """Returns a JAX array, (mapped axes, channels, *spatial), as this class takes it."""
        array, place = np.asarray(array), len(self.case.axes)
        dtype = {"c": np.clongdouble, "b": np.bool_}.get(array.dtype.kind, LD)
        channels = array.shape[place]
        groups = {"BatchNorm": channels, "InstanceNorm": channels, "GroupNorm": GROUPS}
        cut = groups.get(self.case.layer, 1) if channels > 1 else 1
        shape = *array.shape[:place], cut, channels // cut, *array.shape[place + 1 :]
        return array.astype(dtype).reshape(shape)

    def normalise(self, z: dict[str, Any], mask: Any, train: bool) -> tuple[Any, ...]:
        """Returns y, and the mean, 1 / sqrt(variance + eps) and affine map that make it."""
        case, x = self.case, np.where(mask, z["x"], 0)
        used = moments(x, mask, self.over, centred="RMS" not in case.layer)
        if case.layer == "BatchNorm" and train and case.approach != "frozen":
            used, _ = update(case, self.memory, used)
        elif case.layer == "BatchNorm":
            used = self.memory.running
        rstd = rsqrt(used.variance + constant(case.eps, used.variance))
        u = times(x - used.mean, rstd)
        if "weight" in z:
            offset = constant(case.weight_offset, z["weight"])
            u = times(u, z["weight"] + offset) + z["bias"]
        y = ACTIVATIONS[case.activation][1](u, z.get("slope"))
        return np.where(mask, y, 0), used.mean, rstd, u

    def learn(self, x: Any, mask: Any) -> None:
        """Remembers a batch if it has enough values, and all is finite in all channels."""
        most = np.finfo(np.float64 if self.case.x64 else np.float32).max
        batch = pooled(moments(number(x), mask, self.over), self.axes("memory"))
        after = update(self.case, self.memory, batch)[1]
        numbers = [batch.mean, batch.variance * batch.n, after.running.mean, after.running.variance]
        finite = [self.in_each_channel(np.abs(value(a)) <= most) for a in numbers]
        finite = np.all(np.broadcast_arrays(*finite), 0)
        accepted = finite & self.in_each_channel(batch.n > self.case.unbiased)
        self.memory = chosen(accepted, after, self.memory)
        self.accepted, self.rejected = self.accepted + accepted, self.rejected + ~finite

    def derivatives(self, z: Any, v: Any, ct: Any, mask: Any, train: bool) -> dict[str, Any]:
        """Returns the tangent of y along v, or the gradient of Re sum(ct y) and its derivative
        along v, as JAX defines them."""
        case, constant = self.case, set()
        if case.approach == "frozen":  # the layer's own weights are constants
            constant = {"slope", *(["weight", "bias"] if case.weights == "own" else [])}

        def y(name: str = "", s: Any = 0) -> Any:
            """Returns the parts of y along a step of one array, and along v."""
            steps = {k: (s if k == name else 0, 0 if k in constant else v[k]) for k in z}
            return self.normalise({k: number(a, *steps[k]) for k, a in z.items()}, mask, train)[0]

        if case.of == "jvp":
            return {"tangent": {"y": y()[2, 0]}}
        result: dict[str, Any] = {"gradient": {}, "curvature": {}}
        for name, array in z.items():
            units = [1, 1j] if np.iscomplexobj(array) else [1]
            sums = np.zeros((2, array.size), array.dtype)
            for start in range(0, array.size * (name not in constant), 64):
                places = np.arange(start, min(start + 64, array.size))
                for unit in units:
                    s = np.zeros((len(places), array.size), array.dtype)
                    s[range(len(places)), places] = unit
                    parts = np.real(ct * y(name, s.reshape(-1, *array.shape))[1::2])
                    sums[:, places] += parts.reshape(2, len(places), -1).sum(2) * np.conj(unit)
            result["gradient"][name], result["curvature"][name] = sums.reshape(2, *array.shape)
        return result

    def bounds(self, z: Any, v: Any, ct: Any, mask: Any, y: Any, used: Any) -> dict[str, Any]:
        """Returns the errors that roundings of the terms of each result may cause, by section 6
        of DESIGN.md; an error of x - mean counts once more for each derivative of it."""
        case, mean, rstd = self.case, *used
        ulps = 2.0**-29 if case.dtype == "float64" else 1.0
        unit, parts = 1e-6 * ulps, max(1e-6, 2.0**-24 * np.prod([n for _, n in case.axes])) * ulps

        def most(values: Any) -> Any:  # of those that share moments
            return np.where(mask, values, 0).max(self.over, keepdims=True)

        x = np.where(mask, z["x"], 0)
        own = value(moments(number(x), mask, self.over).mean)
        # The mean may be an average of means, in which each has a rounded share.
        memory = value(self.memory.running.mean)
        memory = np.where(self.accepted, memory, own) if case.layer == "BatchNorm" else own
        far = [np.abs(m - mean) * rstd for m in (x, own, memory)]
        xhat = np.max(np.broadcast_arrays(1 + 0 * x.real, *far), 0)
        spread = np.maximum(1, np.abs(x - own) * rstd)
        weight = np.abs(z["weight"] + LD(case.weight_offset)) if "weight" in z else LD(1)
        u = weight * xhat + np.abs(z.get("bias", 0))
        slope, bend = (1.13, 0.8) if case.activation in SMOOTH else (1, 0)
        g = np.abs(ct) * (slope + bend * u)  # and what an error of u changes
        size = {k: np.abs(a) * (rstd if k == "x" else 1) for k, a in v.items()}
        along = {"x": weight * most(size["x"]) * spread, "weight": xhat, "bias": 1, "slope": u}
        along = sum(along[k] * (size[k] if k != "x" else 1) for k in z)
        second = most(g * (1 + weight) ** 2 * xhat**3) * (1 + sum(map(most, size.values())))
        terms = {"x": rstd * spread * most(weight * g), "weight": g * xhat, "bias": g, "slope": g * u}
        result: dict[str, Any] = {"gradient": {}, "curvature": {}}
        result["value"] = {"y": unit * (slope * u + np.abs(y))}
        result["tangent"] = {"y": 2 * unit * (slope + bend * u) * along}
        for k, a in z.items():
            shared = tuple(i for i, n in enumerate(a.shape) if n == 1)
            rounded = (terms[k], parts), (second * (rstd if k == "x" else 1), 10 * parts)
            if k == "x":
                rounded = (terms[k], unit), rounded[1]
            result["gradient"][k], result["curvature"][k] = (
                np.where(mask, t + 0 * x.real, 0).sum(shared, keepdims=True) * error
                for t, error in rounded
            )
        return result


# --- The product.


def last(tree: Any) -> Any:
    return jax.tree.map(lambda a: a[-1], tree)


def twice(tree: Any) -> Any:
    return jax.tree.map(lambda a: jnp.stack([a, a]), tree)


def in_cond(f: Any) -> Any:
    none = lambda *args: jax.tree.map(jnp.zeros_like, f(*args))  # noqa: E731
    return lambda *args: lax.cond(jnp.asarray(True), f, none, *args)


def exported(f: Any) -> Any:
    def call(*args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)
        result = jax.tree.structure(jax.eval_shape(f, *args))
        flat = lambda *leaves: jax.tree.leaves(f(*structure.unflatten(leaves)))  # noqa: E731
        return result.unflatten(jax.export.export(jax.jit(flat))(*leaves).call(*leaves))

    return call


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "remat by policy": lambda f: jax.checkpoint(f, policy=models.recompute_outputs),
    "cond": in_cond,
    "scan": lambda f: lambda *args: last(lax.map(lambda a: f(*a), twice(args))),
    "vmap": lambda f: lambda *args: last(jax.vmap(f)(*twice(args))),
    "export": exported,
}
INNER = [name for name in WRAPPERS if name != "export"]


def wrapped(f: Any, names: tuple[str, ...]) -> Any:
    for name in names:
        f = WRAPPERS[name](f)
    return f


def built(case: Case) -> tuple[Any, Any]:
    """Returns a layer, and its states along the axes "apart", or `None`."""
    options: dict[str, Any] = {"activation": ACTIVATIONS[case.activation][0]}
    options |= {"eps": case.eps, "weight_offset": case.weight_offset}
    if case.layer != "BatchNorm":
        return NORMS[case.layer].make(example(case), **options), None
    names = [[f"axis{i}"] for i in range(len(case.axes))]
    names[:1] = [["axis0", "local"]] if case.devices else names[:1]
    batch, memory = (
        tuple(name for n, (role, _) in zip(names, case.axes, strict=True) for name in n if role == of)
        for of in ("batch", "memory")
    )
    options |= {"unbiased": case.unbiased, "approach": STRATEGIES[case.approach](case.momentum)}
    options["dtype"] = case.dtype if case.dtype == "complex64" else None
    layer, state = make(case.channels, batch, memory_axis_name=memory, **options)
    sizes = [n for role, n in case.axes if role == "apart"]
    return layer, jax.tree.map(lambda a: jnp.broadcast_to(a, (*sizes, *a.shape)), state)


def one_example(case: Case, layer: Any, train: bool) -> Any:
    """Returns a function of x and weights, mask and flag, and state; returns y and state."""

    def call(z: Any, aux: Any, state: Any) -> Any:
        x, own, options = z["x"], (None, None), {}
        if "weight" in z:
            full = case.weights == "value" or case.layer in ROWS
            own = [z[k].reshape(x.shape if full else x.shape[:1]) for k in ("weight", "bias")]
        if case.weights in ("channel", "value"):
            (options["weight"], options["bias"]), own = own, (None, None)
        here = eqx.tree_at(lambda m: (m.weight, m.bias), layer, own, is_leaf=lambda a: a is None)
        if "slope" in z:
            slope = z["slope"].reshape(())
            here = eqx.tree_at(lambda m: m.activation.negative_slope, here, slope)
        if "mask" in aux:
            shape = aux["mask"].shape[case.layer not in ROWS :]
            options["mask"] = aux["mask"].reshape(() if case.mask == "example" else shape)
        if state is None:
            return here(x, **options), None
        inference = ~aux["train"].reshape(()) if case.traced else not train
        return here(x, state, inference=inference, **options)

    return call


def mapped(case: Case, f: Any, i: int = 0) -> Any:
    """Returns f mapped over the axes from the i-th on; of what has size 1 there, all take it."""
    if i == len(case.axes):
        return f
    (role, n), g, place = case.axes[i], mapped(case, f, i + 1), -1 if case.behind else 0
    of_state, name = 0 if role == "apart" else None, f"axis{i}"

    def call(z: Any, aux: Any, state: Any) -> Any:
        where = jax.tree.map(lambda a: 0 if len(a) == n else None, (z, aux))
        z, aux = jax.tree.map(lambda a: a if len(a) == n else a[0], (z, aux))
        z["x"], where[0]["x"] = jnp.moveaxis(z["x"], 0, place), place
        axes: Any = {"in_axes": (*where, of_state), "out_axes": (place, of_state)}
        if i or not case.devices:
            h = jax.vmap(g, axis_name=name, **axes)
        else:  # some examples on each device
            mesh = jax.make_mesh((min(n, 4),), (name,), axis_types=(AxisType.Auto,))
            specs = jax.tree.map(
                lambda axis: P() if axis is None else P(name),
                {"in_specs": axes["in_axes"], "out_specs": axes["out_axes"]},
                is_leaf=lambda axis: axis is None,
            )
            check: Any = {"mesh": mesh, "check_vma": case.devices == "checked"}
            h = jax.shard_map(jax.vmap(g, axis_name="local", **axes), **check, **specs)
        y, state = h(z, aux, state)
        return jnp.moveaxis(y, place, 0), state

    return call


def program(case: Case, layer: Any, train: bool) -> Any:
    """Returns a function that returns results by name, and the new state."""
    f = wrapped(mapped(case, wrapped(one_example(case, layer, train), case.inner)), case.outer)

    def call(z: Any, v: Any, ct: Any, aux: Any, state: Any) -> Any:
        def y(z: Any) -> Any:
            return f(z, aux, state)

        def gradient(z: Any) -> Any:
            out, pull, after = jax.vjp(y, z, has_aux=True)
            return pull(ct)[0], (out, after)

        results: dict[str, Any] = {}
        if case.of == "":
            out, after = y(z)
        elif case.of == "jvp":
            out, along, after = jax.jvp(y, (z,), (v,), has_aux=True)
            results["tangent"] = {"y": along}
        elif case.of == "vjp":
            results["gradient"], (out, after) = gradient(z)
        elif case.of == "jvp of vjp":
            first, second, (out, after) = jax.jvp(gradient, (z,), (v,), has_aux=True)
            results |= {"gradient": first, "curvature": second}
        else:
            first, pull, (out, after) = jax.vjp(gradient, z, has_aux=True)
            results |= {"gradient": first, "curvature": pull(v)[0]}
        return results | {"value": {"y": out}}, after

    return wrapped(call, case.around)


def memory_of(case: Case, layer: Any, state: Any) -> dict[str, Any]:
    held = state.get(layer.memory_index)

    def infer(statistics: Any) -> Any:
        used = layer.approach.infer(statistics)
        return {"mean": used.mean, "variance": used.variance}

    for role, _ in case.axes:
        infer = jax.vmap(infer) if role == "apart" else infer
    counts = {name: getattr(held, name) for name in ("accepted", "rejected")}
    return {"running": infer(held.statistics), "batches": counts}


# --- One case.


def drawn(case: Case, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns x and weights, and mask and flag, with all mapped axes (of size 1 if shared)."""
    fixed, r = (np.random.default_rng([case.seed, i]) for i in (0, step + 1))
    sizes, shape = [n for _, n in case.axes], example(case)
    column, is_complex = (shape[0], *(1 for _ in case.spatial)), case.dtype == "complex64"

    def normal(random: Any, *shape: int) -> Any:
        return random.standard_normal(shape) + (1j * random.standard_normal(shape) if is_complex else 0)

    far, wide = SIZES.get(case.data, (1.0, 1.0))
    far = 1e6 if case.data == "offset" and case.dtype in ("float32", "complex64") else far
    std = wide * fixed.uniform(0.5, 2, column)
    mean = far * normal(fixed, *column) + std * normal(r, *column) / 2
    x = mean + std * normal(r, *sizes, *shape)
    if case.data == "outlier":
        x.flat[r.choice([0, r.integers(x.size)])] = 1e4
    if case.dtype == "float16":
        x = np.clip(x, -6e4, 6e4)
    if case.data == "nonfinite":
        x.flat[r.integers(x.size, size=2)] = r.choice([np.inf, -np.inf, np.nan], 2)
    aux: dict[str, Any] = {"train": np.full([1] * len(sizes), case.steps[step] == "train")}
    along = [1 if case.shared else n for n in sizes]
    if case.mask:
        tail = [n if case.mask == "position" or i == 0 else 1 for i, n in enumerate(case.spatial)]
        tail = [shape[0] if case.layer in ROWS else 1, *tail]
        tail = shape if case.layer in ROWS else tail
        tail = [1 for _ in shape] if case.mask == "example" else tail
        aux["mask"] = r.random((*along, *tail)) < fixed.choice([0.0, 0.3, 0.7, 0.95])
        x = np.where(aux["mask"] | (r.random(x.shape) < 0.5), x, np.nan)
    z = {"x": jnp.asarray(x, case.dtype)}
    if case.weights:
        if case.weights == "own":
            along = [n if role == "apart" and not case.shared else 1 for role, n in case.axes]
        tail = shape if case.weights == "value" or case.layer in ROWS else column
        dtype = "float32" if "16" in case.dtype and not case.narrow else case.dtype
        z |= {k: jnp.asarray(normal(fixed, *along, *tail), dtype) for k in ("weight", "bias")}
    if case.activation == "prelu":
        dtype = "float32" if "16" in case.dtype else case.dtype
        z["slope"] = jnp.full([1] * x.ndim, 0.25, dtype)
    return z, jax.tree.map(jnp.asarray, aux)


def run(case: Case) -> list[str]:
    """Returns what is wrong with a case, in words."""
    try:
        with warnings.catch_warnings(), jax.enable_x64(case.x64), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            return list(problems(case))
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return [f"{type(error).__name__}: {error} [{place.filename}:{place.lineno}]"]


def problems(case: Case) -> Iterator[str]:
    oracle, (layer, state), programs = Oracle(case), built(case), {}
    for step, mode in enumerate(case.steps):
        train = mode == "train"
        z, aux = drawn(case, step)
        exact = {k: oracle.layout(a) for k, a in z.items()}
        mask = oracle.layout(aux.get("mask", np.ones([1] * z["x"].ndim, bool)))
        y, *used, u = map(value, oracle.normalise({k: number(a) for k, a in exact.items()}, mask, train))
        r = np.random.default_rng([case.seed, step, 1])
        std = np.where(np.isfinite(used[1]) & (used[1] > 0), 1 / used[1], 1)

        def normal(a: Any, scale: Any = 1) -> Any:
            drawn = r.standard_normal(a.shape) + (1j * r.standard_normal(a.shape) if jnp.iscomplexobj(a) else 0)
            return jnp.asarray((drawn * scale).astype(drawn.dtype), a.dtype)

        std = np.broadcast_to(std, exact["x"].shape).reshape(z["x"].shape)
        v, ct = {k: normal(a, std if k == "x" else 1) for k, a in z.items()}, normal(z["x"])
        v_exact, ct_exact = {k: oracle.layout(a) for k, a in v.items()}, oracle.layout(ct)
        bounds = oracle.bounds(exact, v_exact, ct_exact, mask, y, used)
        want = {"value": {"y": y}}
        near = (np.abs(u.real) < 2 * bounds["value"]["y"]) & (u != 0)
        if case.of and not ("relu" in case.activation and near.any()):  # a kink
            want |= oracle.derivatives(exact, v_exact, ct_exact, mask, train)
        key = case.traced or train
        programs[key] = programs.get(key) or program(case, layer, train)
        got, state = programs[key](z, v, ct, aux, state)
        if state is not None:
            if train and case.approach != "frozen":
                oracle.learn(exact["x"], mask)
            got |= memory_of(case, layer, state)
            running, zero = oracle.memory.running, 0 * oracle.memory.running.n
            want["running"] = {"mean": value(running.mean), "variance": value(running.variance)}
            want["batches"] = {"accepted": oracle.accepted, "rejected": oracle.rejected}
            unit = 1e-6 * (2.0**-29 if case.x64 and case.dtype == "float64" else 1)
            size = np.abs(value(running.mean)) + np.sqrt(value(running.variance))
            bounds["running"] = {"mean": unit / 2 * size, "variance": unit * (value(running.variance) + case.eps)}
            bounds["batches"] = {"accepted": 0, "rejected": 0}
        for kind, arrays in want.items():
            for name, array in arrays.items():
                if kind in got:
                    a, like = got[kind][name], {"y": z["x"], **z}.get(name, got[kind][name])
                    for problem in compare(a, array, bounds[kind][name], like, kind == "value"):
                        yield f"{kind} of {name}: step {step} ({mode}): {problem}"


def compare(got: Any, want: Any, bound: Any, like: Any, is_value: bool) -> Iterator[str]:
    """Yields a description of what differs by more than the bound and half an ulp."""
    if got.dtype != like.dtype or got.size != like.size:
        yield f"{got.dtype}{got.shape}, not {like.dtype}{like.shape}"
        return
    dtype = got.dtype if got.dtype != jnp.int32 else jnp.dtype(jnp.float32)
    want = np.broadcast_to(want, np.broadcast_shapes(want.shape, np.shape(bound)))
    got = np.asarray(got).astype(want.dtype).reshape(want.shape)
    most, least = float(jnp.finfo(dtype).max), max(float(jnp.finfo(dtype).tiny), 2e-38)
    for part in (np.real, np.imag) if np.iscomplexobj(want) else (np.real,):
        a, b = part(got), part(want)
        allowed = bound + half_ulp(np.nan_to_num(b), dtype) * 1.01 + least
        is_wrong = ~(np.abs(a - b) <= allowed) & (np.abs(b) + allowed < most)
        is_wrong |= is_value & ~np.isfinite(want) & np.isfinite(got)
        if is_wrong.any():
            ratio = np.nan_to_num(np.abs(a - b) / allowed, nan=np.inf) * is_wrong
            place = np.unravel_index(np.nan_to_num(ratio).argmax(), ratio.shape)
            yield (
                f"{is_wrong.sum()} of {is_wrong.size} differ, most at {tuple(map(int, place))}: "
                f"{a[place]:.9g} for {b[place]:.9g}, {ratio[place]:.3g} times the bound"
            )


# --- Shrinking, and the program.


def smaller(case: Case) -> Iterator[Case]:
    for name, now in vars(case).items():
        simple = [getattr(Case, name)] if name != "seed" else []
        if isinstance(now, tuple):
            simple += [now[:i] + now[i + 1 :] for i in range(len(now))]
        for i, item in enumerate(now if name in ("axes", "spatial") else ()):
            simple.append((*now[:i], (item[0], 2) if name == "axes" else 2, *now[i + 1 :]))
        yield from (replace(case, **{name: v}) for v in simple if v != now)


def shrunk(case: Case, problem: str) -> tuple[Case, str]:
    for candidate in smaller(case):
        if candidate == feasible(candidate) and candidate.steps:
            found = run(candidate)
            if found and found[0].split(":")[0] == problem.split(":")[0]:
                return shrunk(candidate, found[0])
    return case, problem


def from_json(text: str) -> Case:
    def tuples(v: Any) -> Any:
        return tuple(map(tuples, v)) if isinstance(v, list) else v

    return Case(**{k: tuples(v) for k, v in json.loads(text).items()})


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first case (0)")
    parser.add_argument("--cases", type=int, default=1, help="how many (1)")
    parser.add_argument("--case", type=from_json, help="one case, as a failure prints it")
    parser.add_argument("--no-shrink", action="store_true", help="print failures as drawn")
    options = parser.parse_args()
    seeds, failed = range(options.seed, options.seed + options.cases), 0
    for seed in tqdm(seeds):
        case = options.case or draw(seed)
        if found := run(case):
            failed += 1
            case, problem = (case, found[0]) if options.no_shrink else shrunk(case, found[0])
            given = {k: v for k, v in vars(case).items() if v != getattr(Case, k)}
            tqdm.write(f"seed {seed}: {problem}\n    python -m tests.fuzz --case '{json.dumps(given)}'")
        if seed % 25 == 24:
            jax.clear_caches()
    print(f"{failed} of {len(seeds)} cases fail")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
