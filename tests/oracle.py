"""Computes the cases of tests/fuzz.py by formulas in extended precision; derivatives are exact.

All arrays have the case's mapped axes, then (groups, channels of a group, *spatial).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.layers.norms import GROUPS
from tests.strategies.recursions import (
    LD,
    Memory,
    Moments,
    chained,
    chosen,
    constant,
    number,
    reference,
    rsqrt,
    squared,
    times,
    unbiased,
    value,
)


def tanh(a: Any) -> Any:
    f = np.tanh(a[0])
    return chained(a, f, 1 - f**2, -2 * f * (1 - f**2))


def gelu(u: Any) -> Any:
    cubic = u + LD(0.044715) * times(u, times(u, u))
    return (u + times(u, tanh(np.sqrt(2 / LD(np.pi)) * cubic))) / 2


ACTIVATIONS: dict[str, Any] = {  # functions of u and the slope of a PReLU
    "": lambda u, _: u,
    "relu": lambda u, _: np.where(u[0] <= 0, 0, u),
    "prelu": lambda u, slope: np.where(u[0] < 0, times(slope, u), u),
    "silu": lambda u, _: (u + times(u, tanh(u / 2))) / 2,
    "gelu": lambda u, _: gelu(u),
    "tanh": lambda u, _: tanh(u),
}


def half_ulp_of_1(dtype: str) -> float:
    """Returns the largest relative error of rounding to a dtype."""
    return float(jnp.finfo(dtype).eps) / 2


SMOOTH = ("silu", "gelu", "tanh")


def moments(x: Any, mask: Any, over: tuple[int, ...], centred: bool = True) -> Moments:
    n = np.broadcast_to(mask, x.shape[2:]).sum(over, LD, keepdims=True)
    first = np.where(mask, value(x), np.inf).min(over, keepdims=True, initial=np.inf)
    first = number(np.where((n > 0) & centred, first, 0))  # so constants are exact
    x = x - first

    def mean(a: Any) -> Any:
        return np.where(mask, a, 0).sum(over, keepdims=True) / np.maximum(n, 1)

    shift = np.where(centred, mean(x), 0)
    return Moments(n, shift + first, mean(squared(x - shift)) + number((n == 0) * LD(1)))


class Oracle:
    """Computes the layer of a case, and holds the memory of this layer."""

    def __init__(self, case: Any):
        self.case, spatial = case, len(case.spatial)
        own = (-1 - spatial,) if "axis=0" in case.layer else range(-1 - spatial, 0)
        first, self.channels = -2 - spatial - len(case.axes), tuple(range(-2 - spatial, 0))
        batch, memory = (
            tuple(first + i for i, (role, _) in enumerate(case.axes) if role == name)
            for name in ("batch", "memory")
        )
        self.over, self.all = (*batch, *own), (*batch, *memory, *own)
        self.learns = case.layer == "BatchNorm" and case.approach != "frozen"
        shape = [n if role == "apart" else 1 for role, n in case.axes]
        self.memory = Memory.empty(*shape, case.channels, *[1] * (1 + spatial))
        self.largest = self.memory.waiting  # |mean| + standard deviation so far
        self.accepted = self.rejected = self.for_each_state(self.largest) * 0

    def for_each_state(self, array: Any) -> Any:
        return array.all(self.channels, keepdims=True)

    def layout(self, array: Any) -> Any:
        """Converts a JAX array, (mapped axes, channels, *spatial), to this class's layout."""
        array, place = np.asarray(array), len(self.case.axes)
        dtype = {"c": np.clongdouble, "b": np.bool_}.get(array.dtype.kind, LD)
        channels = array.shape[place]
        groups = {"BatchNorm": channels, "InstanceNorm": channels, "GroupNorm": GROUPS}
        cut = groups.get(self.case.layer, 1) if channels > 1 else 1
        shape = *array.shape[:place], cut, channels // cut, *array.shape[place + 1 :]
        return array.astype(dtype).reshape(shape)

    def normalise(self, z: dict[str, Any], mask: Any, train: bool) -> tuple[Any, ...]:
        """Returns y, the mean, 1 / sqrt(variance + eps), and the input of the activation."""
        case, x = self.case, np.where(mask, z["x"], 0)
        used = moments(x, mask, self.over, centred="RMS" not in case.layer)
        if self.learns and train:
            used, _ = reference(case, self.memory, used)
        elif case.layer == "BatchNorm":
            used = self.running
        rstd = rsqrt(used.variance + constant(case.eps, used.variance))
        u = times(x - used.mean, rstd)
        if "weight" in z:
            weight = z["weight"] + constant(case.weight_offset, z["weight"])
            u = times(u, weight) + z["bias"]
        y = ACTIVATIONS[case.activation](u, z.get("slope"))
        return np.where(mask, y, 0), used.mean, rstd, u

    @property
    def running(self) -> Moments:
        """Returns the moments of inference."""
        running = self.memory.running
        return unbiased(self.case, running) if self.case.approach == "cumulative" else running

    def reload(self) -> None:
        """Drops pending micro-batches; loaded averages are those of many batches."""
        running, steps, *pending = self.memory
        if self.case.approach != "cumulative":
            running = running._replace(n=np.where(running.n > 0, LD(2) ** 40, 0))
        self.memory = Memory(running, steps, *jax.tree.map(np.zeros_like, pending))
        self.accepted = steps.min(self.channels, keepdims=True)

    def learn(self, x: Any, mask: Any, train: bool) -> None:
        """Remembers a batch of enough values whose statistics are finite in all channels."""
        if not (train and self.learns):
            return
        most = np.finfo(np.float64 if self.case.x64 else np.float32).max
        batch = moments(np.where(mask, x, 0), mask, self.all)
        after = reference(self.case, self.memory, batch)[1]
        all_finite = [batch.mean, batch.variance * batch.n, *after.running[1:]]
        finite = [self.for_each_state(np.abs(value(a)) <= most) for a in all_finite]
        finite = np.all(np.broadcast_arrays(*finite), 0)
        accepted = finite & self.for_each_state(batch.n > self.case.unbiased)
        self.memory = chosen(accepted, after, self.memory)
        size = np.abs(value(batch.mean)) + np.sqrt(value(batch.variance))
        self.largest = np.maximum(self.largest, np.where(accepted, size, 0))
        self.accepted, self.rejected = self.accepted + accepted, self.rejected + ~finite

    def derivatives(self, z: Any, v: Any, ct: Any, masks: Any, train: bool) -> dict[str, Any]:
        """Returns the tangent of y along v, or the gradient of Re sum(ct y) and its derivative
        along v, as JAX defines them. z may have "x0", "x1" ... of the steps before."""
        case, constants = self.case, set()
        if case.approach == "frozen":  # the layer's own weights are
            constants = {"slope", *(["weight", "bias"] if case.weights == "own" else [])}

        def y(name: str = "", s: Any = 0) -> Any:
            """Returns y as a *number*: s along a step of one array, t along v."""
            steps = {k: (s if k == name else 0, 0 if k in constants else v[k]) for k in z}
            numbers = {k: number(a, *steps[k]) for k, a in z.items()}
            layer = Oracle(case) if "x0" in z else self
            for i, mode in enumerate(case.steps if "x0" in z else ()):
                if mode == "load":
                    layer.reload()
                if f"x{i}" in z:
                    layer.learn(numbers[f"x{i}"], masks[i], mode == "train")
            return layer.normalise(numbers, masks[-1], train)[0]

        if case.of == "jvp":
            return {"tangent of y": y()[2, 0]}
        result: dict[str, Any] = {}
        for name, array in z.items():
            sums = np.zeros((2, array.size), array.dtype)
            for start in range(0, array.size * (name not in constants), 64):
                places = np.arange(start, min(start + 64, array.size))
                for unit in [1, 1j] if np.iscomplexobj(array) else [1]:
                    s = np.zeros((len(places), array.size), array.dtype)
                    s[range(len(places)), places] = unit
                    terms = np.real(ct * y(name, s.reshape(-1, *array.shape))[1::2])
                    sums[:, places] += terms.sum(tuple(range(2, terms.ndim))) * np.conj(unit)
            result[f"gradient of {name}"], result[f"curvature of {name}"] = sums.reshape(
                2, *array.shape
            )
        return result

    def bounds(self, z: Any, v: Any, ct: Any, masks: Any, y: Any, used: Any) -> dict[str, Any]:
        """Returns the errors that roundings of the terms of each result may cause. An error of
        x - mean counts once more for each derivative."""
        case, (mean, rstd), mask = self.case, used, masks[-1]
        ulps = 2.0**-29 if case.dtype == "float64" else 1.0
        count = np.prod([n for _, n in case.axes])  # of terms that JAX sums in a weight's dtype
        unit, parts = 1e-6 * ulps, max(1e-6, 2.0**-24 * count) * ulps

        def most(values: Any, over: Any = self.over) -> Any:  # with the same moments
            return np.where(mask, values, 0).max(over, keepdims=True, initial=0)

        x = np.where(mask, z["x"], 0)
        own = value(moments(number(x), mask, self.over).mean)
        # The mean may be an average of means, each with a rounded share.
        memory = value(self.memory.running.mean) if case.layer == "BatchNorm" else own
        far = [np.abs(m - mean) * rstd for m in (x, own, np.where(self.accepted, memory, own))]
        xhat = np.max(np.broadcast_arrays(1 + 0 * np.real(x), *far), 0)
        spread = np.maximum(1, np.abs(x - own) * rstd)
        weight = np.abs(z["weight"] + LD(case.weight_offset)) if "weight" in z else LD(1)
        u = weight * xhat + np.abs(z.get("bias", 0))
        # The largest first and second derivatives of tanh, SiLU and GELU are GELU's, 1.129 and
        # 0.798. `bend` is the effect of an error of u, and of 1 - tanh^2 in GELU's derivative:
        # its factor is 1.5 sqrt(2 / pi) 0.0447 u^3, and tanh^2 is rounded by half a unit.
        slope, bend = (1.13, 0.8) if case.activation in SMOOTH else (1, 0)
        bend = bend * u + 0.03 * u**3 * (case.activation == "gelu")
        g = np.abs(ct) * (slope + bend)
        size = {k: np.abs(a) * (rstd if k == "x" else 1) for k, a in v.items()}
        moves = {"x": weight * most(size["x"]) * spread, "weight": xhat, "bias": 1, "slope": u}
        # Of an earlier x: averages have weights of sum 1; a merged variance has also distances
        # of means; a clipped one is at most three times a running one, of any channel.
        is_clip, early = case.approach == "clip", [k for k in z if k[1:].isdigit()]
        wide = (*self.all, self.channels[0]) if is_clip else self.all
        largest = most(rstd, wide) * 3 ** (is_clip * len(early) / 2)
        inside = {k: (np.where(m, z[k], 0), m) for k, m in zip(early, masks, strict=False)}
        batches = {k: moments(number(a), m, self.all) for k, (a, m) in inside.items()}
        means, effect = [mean, *(value(batch.mean) for batch in batches.values())], {}
        for k, (a, m) in inside.items():
            far = [np.nan_to_num(np.abs(a - mean) * largest, posinf=0) for mean in means]
            reach = largest * np.max(np.broadcast_arrays(1, *far), 0)
            size[k] = np.where(m, size[k] * reach, 0).max(wide, keepdims=True, initial=0)
            moves[k], effect[k] = weight * xhat, reach / np.maximum(batches[k].n, 1)
        moves = sum(moves[k] * (1 if k == "x" else size[k]) for k in z)
        result = {"value of y": unit * (slope * u + np.abs(y))}
        if case.returns:
            rounding = half_ulp_of_1(case.returns) * np.abs(y)
            result["value of y"] = result["value of y"] + rounding
        result["tangent of y"] = 2 * unit * (slope + bend) * moves
        first = {
            "x": rstd * spread * most(weight * g),
            "weight": g * xhat,
            "bias": g,
            "slope": g * u,
            **dict.fromkeys(early, weight * g * xhat),
        }
        second = most(g * (1 + weight) ** 2 * xhat**3) * (1 + sum(map(most, size.values())))
        for k, a in z.items():
            shared = tuple(i for i, n in enumerate(a.shape) if n == 1 and k != "x")
            shared, factor = (wide, effect[k]) if k in effect else (shared, 1)
            one, two = (
                np.where(mask, terms + 0 * np.real(x), 0).sum(shared, keepdims=True) * factor
                for terms in (first[k], second * rstd if k == "x" else second)
            )
            is_narrow = k in ("weight", "bias") and case.is_narrow(k)
            rounded = parts + (count * half_ulp_of_1(case.dtype_of(k)) if is_narrow else 0)
            result[f"gradient of {k}"] = (unit if k == "x" else rounded) * one
            result[f"curvature of {k}"] = 10 * parts * two
        return result

    def remembered(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the remembered values by name, and the bounds of their errors."""
        mean, variance = map(value, self.running[1:])
        unit = 1e-6 * (2.0**-29 if self.case.dtype == "float64" else 1)
        bounds = unit / 2 * self.largest, unit * (variance + self.case.eps)
        names = "running mean", "running variance", "accepted", "rejected"
        return (
            dict(zip(names, (mean, variance, self.accepted, self.rejected), strict=True)),
            dict(zip(names, (*bounds, 0, 0), strict=True)),
        )
