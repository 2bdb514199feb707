"""Compares random uses of the layers with formulas in extended precision, tests/oracle.py.

A case is drawn from a seed: a layer with its settings, shape, dtype, data and mask, some steps
of training and inference, a derivative, and transformations of JAX. After each step, y, the
derivative and the memory must lie within bounds that follow from the arithmetic. Where bits of
rows are promised (docs/determinism.md), y and dx must have the bits of a plain program for
more examples, in reverse order. For a failing case, the smallest case found with the same
problem is printed as an argument for --case; omitted fields have their simplest values. The
exit status is 1 if a case fails. Examples:

    make fuzz SEED=0 CASES=200              # cases 0 to 199
    python -m tests.fuzz --seed 17          # case 17 alone
    python -m tests.fuzz --case '{"layer": "LayerNorm", "data": "outlier", "of": "vjp"}'
"""

import argparse
import contextlib
import functools
import json
import math
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

from eqx_norm import models, strategies
from experiments.common.exact import half_ulp
from tests.compiling import unoptimised
from tests.helpers import Loading, array, make
from tests.layers.norms import EXAMPLE_NORMS, GROUPS, NORMS, with_parameters
from tests.oracle import SMOOTH, Oracle
from tests.strategies.recursions import STRATEGIES, number, value

WEIGHTS = ("weight", "bias")
ROWS = ("LayerNorm", "RMSNorm")  # weight and mask have a number for each value
ACTIVATIONS = {"": None, "relu": jax.nn.relu, "prelu": None, "tanh": jnp.tanh}
ACTIVATIONS |= {"silu": jax.nn.silu, "gelu": jax.nn.gelu}
# Sizes of mean and standard deviation; "outlier" and "nonfinite" replace some values.
DATA = {"normal": (1, 1), "offset": (1e3, 1), "far": (1e6, 1), "constant": (1e3, 0)}
DATA |= {"tiny": (1e-20, 1e-20), "huge": (1e16, 1e16), "denormal": (1e-41, 1e-41)}
DATA |= {"outlier": (1, 1), "nonfinite": (1, 1)}


def of_two(transform: Any) -> Any:
    """Returns a transformation that calls f for a pair of equal arguments."""

    def call(f: Any, *args: Any) -> Any:
        pair = jax.tree.map(lambda a: jnp.stack([a, a]), args)
        return jax.tree.map(lambda a: a[1], transform(lambda args: f(*args))(pair))

    return lambda f: lambda *args: call(f, *args)


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "remat by policy": lambda f: jax.checkpoint(f, policy=models.recompute_outputs),
    "cond": lambda f: lambda *args: lax.cond(jnp.asarray(True), f, f, *args),
    "scan": of_two(lambda f: lambda pair: lax.map(f, pair)),
    "vmap": of_two(jax.vmap),
    "export": lambda f: lambda *args: jax.export.export(jax.jit(f))(*args).call(*args),
}
INNER = [name for name in WRAPPERS if name != "export"]


def wrapped(f: Any, names: tuple[str, ...]) -> Any:
    for name in names:
        f = WRAPPERS[name](f)
    return f


OTHER_DTYPES = (*["x"] * 6, "bfloat16", "float16", "float64", "complex64")
NARROWING = ("bfloat16", "float64", "complex64")


def one_of(*values: Any) -> Any:
    return field(default=values[0], metadata={"values": values})


@dataclass(frozen=True)
class Case:
    """Describes one use of a layer; the first value of each field is the simplest."""

    seed: int = 0  # draws the data
    layer: str = one_of(*["BatchNorm"] * 6, *EXAMPLE_NORMS)
    approach: str = one_of(*STRATEGIES)
    momentum: float = one_of(0.9, 0.99, 0.5, 0.3, 0.01, 0.9999)
    unbiased: bool = one_of(False, False, True)
    channels: int = one_of(1, 2, 3)  # in each group for GroupNorm
    spatial: tuple[int, ...] = ()
    # Mapped axes, outermost first. Moments are reduced over "batch", the memory of a batch norm
    # also over "memory"; a batch norm has one state for each index of "apart". To other norms
    # both are the same.
    axes: tuple[tuple[str, int], ...] = (("batch", 3),)
    behind: bool = one_of(False, False, True)  # whether mapped axes of x and y are the last
    devices: str = one_of("", "", "checked", "unchecked")  # check_vma, along the first axis
    x64: bool = one_of(*[False] * 5, True)
    dtype: str = one_of(*["float32"] * 4, "bfloat16", "float16", "complex64", "float64")
    # "x" is the dtype of x, "" float32 or wider.
    weight_dtype: str = one_of("", *OTHER_DTYPES)
    bias_dtype: str = one_of("", *OTHER_DTYPES)
    returns: str = one_of(*[""] * 9, *NARROWING)  # the dtype of the activation's result
    eps: float = one_of(1e-5, 1e-5, 1e-3, 1e-12)
    weight_offset: float = one_of(0.0, 0.0, 1.0, -2.5)
    activation: str = one_of("", "", *ACTIVATIONS)
    weights: str = one_of("", "own", "own", "channel", "value")  # "channel", "value": arguments
    mask: str = one_of("", "", "", "example", "row", "position")
    shared: bool = one_of(False, False, True)  # all examples have the same weights and mask
    data: str = one_of("normal", *DATA)
    steps: tuple[str, ...] = ("train",)
    traced: bool = one_of(False, False, True)  # inference= is traced
    of: str = one_of("", "vjp", "vjp", "jvp", "jvp of vjp", "vjp of vjp")  # the derivative
    through: bool = one_of(False, True)  # that of the last step also in x of all before
    inner: tuple[str, ...] = ()  # transformations of one example's function, innermost first
    outer: tuple[str, ...] = ()  # transformations of the function of all examples
    around: tuple[str, ...] = ("jit",)  # transformations of the derivative

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape of one example."""
        return self.channels * (GROUPS if self.layer == "GroupNorm" else 1), *self.spatial

    def dtype_of(self, name: str) -> str:
        """Returns the dtype of "weight" or "bias"."""
        dtype = {"weight": self.weight_dtype, "bias": self.bias_dtype}[name]
        wide = "float32" if "16" in self.dtype else self.dtype
        return {"": wide, "x": self.dtype}.get(dtype, dtype)

    def is_narrow(self, name: str) -> bool:
        """Returns whether "weight" or "bias" has less precision than the computation."""
        precision = jnp.finfo("float32" if "16" in self.dtype else self.dtype).bits
        return jnp.finfo(self.dtype_of(name)).bits < precision

    @property
    def refused(self) -> str:
        """Returns the argument whose complex numbers do not fit a real x, or ""."""
        if self.dtype == "complex64":
            return ""
        given = {"weight": self.weight_dtype, "bias": self.bias_dtype}
        given["the result of activation"] = self.returns
        return next((name for name, dtype in given.items() if dtype == "complex64"), "")


# A field, the condition under which its value is infeasible, and the value used instead.
RULES: list[tuple[str, Callable[[Case], Any], Any]] = [
    ("approach", lambda c: c.layer != "BatchNorm", "batch"),
    ("unbiased", lambda c: {role for role, _ in c.axes} <= {"apart"}, False),  # n may be 1
    ("devices", lambda c: not c.axes or c.axes[0][1] not in (2, 4, 8), ""),
    ("behind", lambda c: c.devices, False),
    ("around", lambda c: c.devices and "export" in c.around, ("jit",)),  # runs on one device
    ("spatial", lambda c: 0 in c.spatial and (c.devices or c.layer in ROWS), ()),  # an error
    ("through", lambda c: not c.of or c.layer != "BatchNorm", False),
    ("weight_dtype", lambda c: not c.weights or 0 in c.spatial, ""),
    ("bias_dtype", lambda c: not c.weights or 0 in c.spatial, ""),
    ("returns", lambda c: 0 in c.spatial, ""),
    ("returns", lambda c: c.activation == "prelu" or c.dtype == "complex64", ""),
    ("returns", lambda c: c.returns == "bfloat16" and c.of, ""),  # gradients pass bfloat16
    ("x64", lambda c: "float64" in (c.dtype, c.weight_dtype, c.bias_dtype, c.returns), True),
    # Narrow dtypes round intermediate results.
    ("of", lambda c: "16" in c.dtype and " of " in c.of, "vjp"),
    ("of", lambda c: any(map(c.is_narrow, WEIGHTS)) and " of " in c.of, "vjp"),
    ("activation", lambda c: c.dtype == "complex64", ""),
    ("data", lambda c: c.data == "far" and "32" not in c.dtype, "offset"),  # no digits are left
    ("data", lambda c: " of " in c.of and c.data == "huge", "offset"),  # 1 / std^3 is 0
    # XLA's derivatives of these functions overflow at large values.
    ("activation", lambda c: c.data in LARGE and c.activation in SMOOTH, "relu"),
]
MODES = ("train", "train", "train", "infer", "load")  # "load": reloads the memory, and infers
LARGE = ("offset", "far", "outlier", "huge")
# A few rows are the remainder of a vectorised loop, and have the bits of other remainders.
MORE = 67
MOST = {"": 2000, "jvp": 2000, "vjp": 120}  # values of x; 60 for second derivatives


def feasible(case: Case) -> Case:
    for name, is_wrong, right in RULES:
        case = replace(case, **{name: right}) if is_wrong(case) else case
    return case


def draw(seed: int) -> Case:
    r = random.Random(seed)

    def some(values: Any, *counts: int) -> tuple[Any, ...]:
        return tuple(r.choice(values) for _ in range(r.choice(counts)))

    drawn = {f.name: r.choice(f.metadata["values"]) for f in fields(Case) if f.metadata}
    case = Case(seed, **drawn, steps=some(MODES, 1, 2, 3, 5))
    case = replace(case, inner=some(INNER, 0, 0, 1, 2), outer=some(INNER, 0, 0, 1))
    case = replace(case, around=(*some(INNER, 0, 0, 1), *some(["jit", "export"], 0, 1, 1, 1)))
    # Bits of rows are promised for examples that are whole, not in parts along "batch".
    often = "batch" if case.layer == "BatchNorm" else "memory"
    roles, size = ["batch", "memory", "apart", often], np.inf
    while size > MOST.get(case.of, 60):
        axes = some([(role, n) for role in roles for n in (2, 3, 4, 8)], 1, 1, 2, 3)
        case = feasible(replace(case, axes=axes, spatial=some([1, 2, 3, 5, 7, 16, 0], 0, 1, 2)))
        size = np.prod([*case.shape, *(n for _, n in axes)])
    return case


def small(case: Case) -> Case:
    """Returns the case with at most two steps and transformations, which compiles faster."""
    outer = () if case.inner else case.outer[:1]
    shorter = {"steps": case.steps[-2:], "inner": case.inner[:1], "outer": outer}
    return feasible(replace(case, **shorter, around=case.around[-1:]))


def normal(case: Case, random: Any, shape: Any) -> Any:
    real, imaginary = random.standard_normal((2, *shape))
    return real + 1j * imaginary if case.dtype == "complex64" else real


def arrays(case: Case, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns x and weights, mask and flag, with all mapped axes; shared arrays have size 1."""
    fixed, r = (np.random.default_rng([case.seed, i]) for i in (0, step + 1))
    sizes, ones = [n for _, n in case.axes], [1 for _ in case.spatial]
    wide = "float32" if "16" in case.dtype else case.dtype
    (far, scale), column = DATA[case.data], (case.shape[0], *ones)
    std = scale * fixed.uniform(0.5, 2, column)
    mean = far * normal(case, fixed, column) + std * normal(case, r, column) / 2
    x = mean + std * normal(case, r, (*sizes, *case.shape))
    if case.data == "outlier" and x.size:
        x.flat[r.choice([0, r.integers(x.size)])] = 1e4
    if case.dtype == "float16":
        x = np.clip(x, -6e4, 6e4)
    if case.data == "nonfinite" and x.size:
        x.flat[r.integers(x.size, size=2)] = r.choice([np.inf, -np.inf, np.nan], 2)
    aux: dict[str, Any] = {"train": np.full([1 for _ in sizes], case.steps[step] == "train")}
    along = [1 if case.shared else n for n in sizes]
    if case.mask:
        tails = {"example": (1, *ones), "position": (1, *case.spatial)}
        tails["row"] = 1, *case.spatial[:1], *ones[1:]
        of_values = case.layer in ROWS and case.mask != "example"
        tail = case.shape if of_values else tails[case.mask]
        aux["mask"] = r.random((*along, *tail)) < fixed.choice([0, 0.3, 0.7, 0.95])
        x = np.where(aux["mask"] | (r.random(x.shape) < 0.5), x, np.nan)
    z = {"x": array(x, case.dtype)}
    if case.weights:
        if case.weights == "own":
            along = [n if role == "apart" and not case.shared else 1 for role, n in case.axes]
        tail = case.shape if case.weights == "value" or case.layer in ROWS else column
        for name in ("weight", "bias"):
            weight, dtype = normal(case, fixed, (*along, *tail)), case.dtype_of(name)
            weight = weight if dtype == "complex64" else np.real(weight)
            z[name] = array(weight, dtype)
    if case.activation == "prelu":
        z["slope"] = array(np.full([1] * x.ndim, 0.25), wide)
    return z, jax.device_put(aux)


@functools.cache
def returning(activation: Any, dtype: str) -> Any:
    """Returns the activation with results of another dtype."""
    return lambda u: activation(u).astype(dtype)


def built(case: Case) -> tuple[Any, Any]:
    """Returns a layer, and its state stacked along the axes "apart", or `None`."""
    is_prelu = case.activation == "prelu"
    activation = eqx.nn.PReLU(0.25) if is_prelu else ACTIVATIONS[case.activation]
    if case.returns:
        activation = returning(activation or (lambda u: u), case.returns)
    options: dict[str, Any] = {"activation": activation}
    options |= {"eps": case.eps, "weight_offset": case.weight_offset}
    named: dict[str, list[str]] = {"batch": [], "memory": [], "apart": []}
    for i, (role, _) in enumerate(case.axes):
        named[role] += [f"axis{i}", *(["local"] if case.devices and i == 0 else [])]
    options["axis_name"] = tuple(named["batch"])
    if case.layer != "BatchNorm":
        return NORMS[case.layer].make(case.shape, **options), None
    options |= {"unbiased": case.unbiased, "approach": STRATEGIES[case.approach](case.momentum)}
    options["dtype"] = case.dtype if case.dtype == "complex64" else None
    layer, state = make(case.channels, memory_axis_name=tuple(named["memory"]), **options)
    sizes = [n for role, n in case.axes if role == "apart"]
    return layer, jax.tree.map(
        lambda a: array(np.broadcast_to(a, (*sizes, *a.shape)), a.dtype), state
    )


def loaded(case: Case, layer: Any, state: Any) -> Any:
    """Returns the state after another strategy has taken it over, and the layer's has again."""
    counts = case.approach == "cumulative"
    other, values = (Loading(), None) if counts else (strategies.Cumulative(), 7)

    def there_and_back(state: Any) -> Any:
        there = models.reconfigure(layer, state, approach=other, values=values)
        return models.reconfigure(*there, approach=layer.approach)[1]

    for role, _ in case.axes:
        there_and_back = jax.vmap(there_and_back) if role == "apart" else there_and_back
    return there_and_back(state)


def one_example(case: Case, layer: Any, train: bool) -> Any:
    """Returns a function of (x and weights, mask and flag, state) of one example."""

    def call(z: Any, aux: Any, state: Any) -> Any:
        x, names = z["x"], ("weight", "bias")
        shape = x.shape if case.weights == "value" or case.layer in ROWS else x.shape[:1]
        given = {k: z[k].reshape(shape) if k in z else None for k in names}
        here = with_parameters(
            layer, *(given[k] if case.weights == "own" else None for k in names)
        )
        options: dict[str, Any] = {} if case.weights == "own" else given
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
    """Maps f over the axes from the i-th on; arrays of size 1 along an axis are shared."""
    if i == len(case.axes):
        return f
    (role, n), g, place = case.axes[i], mapped(case, f, i + 1), -1 if case.behind else 0
    of_state, name = 0 if role == "apart" else None, f"axis{i}"

    def call(z: Any, aux: Any, state: Any) -> Any:
        where = jax.tree.map(lambda a: 0 if len(a) == n else None, (z, aux))
        z, aux = jax.tree.map(lambda a: a if len(a) == n else a[0], (z, aux))
        z["x"], where[0]["x"] = jnp.moveaxis(z["x"], 0, place), place
        axes = ((*where, of_state), (place, of_state))
        on_devices = i == 0 and case.devices
        h = jax.vmap(g, *axes, axis_name="local" if on_devices else name)
        if on_devices:
            mesh = jax.make_mesh(
                (min(n, 4),), (name,), axis_types=(jax.sharding.AxisType.Auto,)
            )
            inputs, outputs = jax.tree.map(
                lambda axis: P() if axis is None else P(name), axes, is_leaf=lambda a: a is None
            )
            options: Any = {"mesh": mesh, "check_vma": case.devices == "checked"}
            h = jax.shard_map(h, in_specs=inputs, out_specs=outputs, **options)
        y, state = h(z, aux, state)
        return jnp.moveaxis(y, place, 0), state

    return call


def program(case: Case, layer: Any, modes: tuple[str, ...]) -> Any:
    """Returns a function of steps, whose outputs are a dict of results, and the new state."""
    layers = (wrapped(one_example(case, layer, mode == "train"), case.inner) for mode in modes)
    steps = [wrapped(mapped(case, f), case.outer) for f in layers]

    def call(z: Any, v: Any, ct: Any, aux: Any, state: Any) -> Any:
        def y(z: Any) -> Any:
            out, after = None, state
            for i, f in enumerate(steps):
                if modes[i] == "load" and state is not None:
                    after = loaded(case, layer, after)
                out, after = f({**z, "x": z.get(f"x{i}", z["x"])}, aux[i], after)
            return out, after

        def gradient(z: Any) -> Any:
            out, pull, after = jax.vjp(y, z, has_aux=True)
            return pull(ct)[0], (out, after)

        if case.of in ("", "jvp"):
            *found, after = jax.jvp(y, (z,), (v,), has_aux=True) if case.of else y(z)
            return dict(zip(("value of y", "tangent of y"), found, strict=False)), after
        if case.of == "vjp":
            *derivatives, (out, after) = gradient(z)
        elif case.of == "jvp of vjp":
            *derivatives, (out, after) = jax.jvp(gradient, (z,), (v,), has_aux=True)
        else:
            first, pull, (out, after) = jax.vjp(gradient, z, has_aux=True)
            derivatives = [first, *pull(v)]
        pairs = zip(("gradient", "curvature"), derivatives, strict=False)
        results = {f"{kind} of {k}": a for kind, tree in pairs for k, a in tree.items()}
        return {"value of y": out, **results}, after

    return wrapped(call, case.around)


def promises_bits(case: Case, mode: str) -> bool:
    """Returns whether docs/determinism.md promises the bits of rows: in compiled programs, of
    real x, of a batch norm's inference whose statistics are operands, and of examples that are
    whole, not in parts along an axis."""
    merges = any(role == "batch" for role, _ in case.axes)
    is_inference = mode != "train" and not case.through
    is_of_rows = is_inference if case.layer == "BatchNorm" else not merges
    is_compiled = not {"jit", "export"}.isdisjoint(case.around)
    return is_of_rows and is_compiled and case.dtype != "complex64"


def plain(case: Case) -> Case:
    """Returns the case of more examples along one mapped axis, without transformations."""
    role = "apart" if "apart" in dict(case.axes) else "memory"
    how: Any = {"inner": (), "outer": (), "around": ("jit",), "devices": "", "behind": False}
    how |= {"of": "vjp", "through": False, "traced": False}
    return replace(case, axes=((role, 2 * math.prod(n for _, n in case.axes) + MORE),), **how)


def among_more(case: Case, z: Any, ct: Any, aux: Any, state: Any) -> tuple[Any, ...]:
    """Returns the arguments of the program of `plain(case)`: the examples, in reverse order,
    are the first, which a vectorised loop computes, and the last, which may be its
    remainder."""
    sizes, count = [n for _, n in case.axes], math.prod(n for _, n in case.axes)
    apart = [n if role == "apart" else 1 for role, n in case.axes]
    order = np.r_[:count, np.arange(MORE) % count, :count][::-1]

    def flat(a: Any) -> Any:
        own = a.shape[len(sizes) :]
        if math.prod(a.shape[: len(sizes)]) == 1:
            return a.reshape(1, *own)  # all examples share it
        return jnp.broadcast_to(a, (*sizes, *own)).reshape(count, *own)[order]

    def of_state(a: Any) -> Any:
        own = a.shape[len(apart) - apart.count(1) :]
        return a if own == a.shape else flat(a.reshape(*apart, *own))

    z = {k: a for k, a in z.items() if not k[1:].isdigit()}  # without x of the steps before
    return *jax.tree.map(flat, (z, z, ct, [aux])), jax.tree.map(of_state, state)


def other_bits(got: Any, want: Any) -> str:
    """Describes the first value of other bits; returns "" if there is none. All NaN are equal,
    and 0 and -0, which a traced `inference` adds to each other."""
    places = np.argwhere((got != want) & ~(np.isnan(got) & np.isnan(want)))
    if len(places) == 0:
        return ""
    at = tuple(map(int, places[0]))
    return f"{len(places)} of {got.size}, at {at} {got[at]}, not {want[at]}"


def run(case: Case, *, compares_bits: bool = True) -> list[str]:
    """Returns the problems of a case, in words."""
    # XLA's optimisation takes most of the time; bits are those of optimised programs.
    compares_bits = compares_bits and any(promises_bits(case, mode) for mode in case.steps)
    try:
        with (
            contextlib.nullcontext() if compares_bits else unoptimised(),
            warnings.catch_warnings(),
            jax.enable_x64(case.x64),
            np.errstate(all="ignore"),
        ):
            warnings.simplefilter("ignore")
            return list(problems(case, compares_bits=compares_bits))
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]


def problems(case: Case, *, compares_bits: bool) -> Iterator[str]:
    oracle, (layer, state), programs = Oracle(case), built(case), {}
    alone = program(plain(case), built(plain(case))[0], ("infer",))
    empty, early, auxes, masks = state, {}, [], []  # of all steps
    for step, mode in enumerate(case.steps):
        if mode == "load":
            oracle.reload()
        train, (z, aux) = mode == "train", arrays(case, step)
        auxes.append(aux)
        masks.append(oracle.layout(aux.get("mask", np.ones([1] * z["x"].ndim, bool))))
        modes = ("train" if case.traced and mode == "infer" else mode,)
        given, before = [aux], state
        if case.through and step == len(case.steps) - 1:
            z, modes, given, before = z | early, tuple(case.steps), auxes, empty
        early[f"x{step}"] = z["x"]
        exact = {k: oracle.layout(a) for k, a in z.items()}
        numbers = {k: number(a) for k, a in exact.items()}
        y, *used, u = map(value, oracle.normalise(numbers, masks[-1], train))
        # The tangent of x has the standard deviation of x, the cotangent 1.
        std = np.where(np.isfinite(used[1]) & (used[1] > 0), 1 / used[1], 1)
        std = np.broadcast_to(std, y.shape).reshape(z["x"].shape).astype(float)
        r = np.random.default_rng([case.seed, step, 1])
        v = {k: normal(case, r, a.shape) * (std if k[0] == "x" else 1) for k, a in z.items()}
        v = {k: a if jnp.iscomplexobj(z[k]) else np.real(a) for k, a in v.items()}
        v = {k: array(a, z[k].dtype) for k, a in v.items()}
        ct = array(normal(case, r, z["x"].shape), z["x"].dtype)
        programs[modes] = programs.get(modes) or program(case, layer, modes)
        if case.refused:
            call = functools.partial(programs[modes], z, v, ct, given, before)
            yield from not_refused(case, call)
            return
        along = {k: oracle.layout(a) for k, a in v.items()}, oracle.layout(ct), masks
        bounds, want = oracle.bounds(exact, *along, y, used), {"value of y": y}
        near = (np.abs(u.real) < 2 * bounds["value of y"]) & (u != 0)
        if case.of and not ("relu" in case.activation and near.any()):  # near a kink
            want |= oracle.derivatives(exact, *along, train)
        got, state = programs[modes](z, v, ct, given, before)
        if compares_bits and promises_bits(case, mode):
            rows, _ = alone(*among_more(case, z, ct, aux, state))
            for name in ("value of y", *["gradient of x"] * (case.of == "vjp")):
                a, b = np.asarray(got[name]), np.asarray(rows[name])[::-1]
                n = (len(b) - MORE) // 2
                for rows_of_case in (b[:n], b[-n:]):
                    if found := other_bits(a, rows_of_case.reshape(a.shape)):
                        yield f"bits of {name}: step {step} ({mode}): {found}"
        if state is not None:
            oracle.learn(numbers["x"], masks[-1], train)
            running, held = layer.running(state), state.get(layer.memory_index)
            got |= {"running mean": running.mean, "running variance": running.variance}
            got |= {"accepted": held.accepted, "rejected": held.rejected}
            memory = oracle.remembered()
            want, bounds = want | memory[0], bounds | memory[1]
        for name in want.keys() & got.keys():
            a = got[name]
            like = {**z, "y": z["x"]}.get(name.split(" of ")[-1], a)
            if (a.shape, a.dtype) != (like.shape, like.dtype):
                yield f"{name}: {a.dtype}{a.shape}, not {like.dtype}{like.shape}"
            elif found := difference(a, want[name], bounds[name], name == "value of y"):
                yield f"{name}: step {step} ({mode}): {found}"


def not_refused(case: Case, call: Callable[[], object]) -> Iterator[str]:
    """Yields a problem unless the call raises the error for complex numbers."""
    try:
        call()
    except TypeError as error:
        if not str(error).startswith(case.refused):
            yield f"error: {error}"
    else:
        yield f"error: {case.refused} lost its imaginary part"


def difference(got: Any, want: Any, bound: Any, is_value: bool) -> str:
    """Describes the largest difference above the bound and half an ulp; returns "" if none is.
    Derivatives are compared where they are finite, all values within the dtype's range."""
    info = jnp.finfo(jnp.float32 if got.dtype == jnp.int32 else got.dtype)
    least = max(float(info.smallest_normal), 2e-38)
    want = np.broadcast_to(want, np.broadcast_shapes(want.shape, np.shape(bound)))
    got, size = np.asarray(got).astype(want.dtype).reshape(want.shape), np.abs(want)
    halves = 1.5 if np.iscomplexobj(want) else 1.01
    allowed = bound + half_ulp(np.nan_to_num(size), info.dtype) * halves + least
    is_wrong = ~(np.abs(got - want) <= allowed) & (size + allowed < float(info.max))
    is_wrong |= is_value & ~np.isfinite(want) & np.isfinite(got)
    if not is_wrong.any():
        return ""
    times = np.nan_to_num(np.abs(got - want) / allowed, nan=np.inf) * is_wrong
    at = tuple(map(int, np.unravel_index(np.nan_to_num(times).argmax(), times.shape)))
    return f"at {at} {got[at]:.9g}, not {want[at]:.9g}, {times[at]:.3g} times the bound"


def smaller(case: Case) -> Iterator[Case]:
    for name, now in vars(case).items():
        simple = [] if name == "seed" else [getattr(Case, name)]
        for i, item in enumerate(now if isinstance(now, tuple | list) else ()):
            simple.append((*now[:i], *now[i + 1 :]))
            if name == "axes":
                simple.append((*now[:i], (item[0], 2), *now[i + 1 :]))
        yield from (replace(case, **{name: v}) for v in simple if v != now)


def command(case: Case) -> str:
    """Returns the command that runs the case."""
    given = {k: v for k, v in vars(case).items() if v != getattr(Case, k)}
    return f"python -m tests.fuzz --case '{json.dumps(given)}'"


def shrunk(case: Case, problem: str, end: float) -> tuple[Case, str]:
    """Returns the smallest case found that fails in the same result, and its problem."""
    for candidate in smaller(case):
        if candidate == feasible(candidate) and candidate.steps and time.time() < end:
            found = run(candidate)
            if found and found[0].split(":")[0] == problem.split(":")[0]:
                return shrunk(candidate, found[0], end)
    return case, problem


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("fuzz", description=__doc__, formatter_class=formatter)
    parser.add_argument("--seed", type=int, default=0, help="of the first case (0)")
    parser.add_argument("--cases", type=int, default=1, help="how many (1)")
    parser.add_argument("--case", type=json.loads, help="one case, as a failure prints it")
    parser.add_argument("--seconds", type=float, default=60, help="to shrink for (60)")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    failed = 0
    for seed in tqdm(range(options.seed, options.seed + options.cases)):
        case = draw(seed) if options.case is None else Case(**options.case)
        if found := run(case):
            failed += 1
            case, problem = shrunk(case, found[0], time.time() + options.seconds)
            tqdm.write(f"seed {seed}: {problem}\n    {command(case)}")
        if seed % 25 == 24:
            jax.clear_caches()  # the caches would take gigabytes
    print(f"{options.cases} cases, of which {failed} fail")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
