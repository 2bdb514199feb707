"""Computes a pass over x on each device's shard of x, in a program that XLA splits.

XLA splits its own operations, but gathers x for a kernel, and cannot split the variants of
`on_cpu` and `on_gpu`. `jax.experimental.custom_partitioning` calls `_Sharded.partition` when
XLA has decided how the operands are split: each device then runs the variant that one device
would run, and vectors alone are sent.

The compiled program names the Python function by its address, so JAX's persistent cache of
compiled programs misses (https://github.com/jax-ml/jax/issues/21159), unless
`jax_remove_custom_partitioning_ptr_from_cache_key` is set, which keeps the address out of the
key (https://github.com/jax-ml/jax/pull/22702). Two passes on the same shapes are then told
apart by a number, `_Sharded.fingerprint`.
"""

import math
import re
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jaxtyping import Array, Shaped

from eqx_norm._jax.lowering import Aval, Over, without_mesh

from .formulas.reference import Shape

# Given `Over`, returns the pass: a function of its operands and parameters.
PassOver = Callable[[Over], Callable[..., Sequence[Array]]]


def on_each_shard(
    compute: PassOver,
    vectors: Sequence[Shape],
    results: Sequence[Aval],
    full: int,
    **params: Any,
) -> Callable[..., list[Array]]:
    """Returns a function of the operands of a pass that computes `results` on each device.

    **Arguments:**

    - `compute`: merges its sums over the given mesh axes.
    - `vectors`: the shapes of sums. The first says how x is cut into blocks.
    - `full`: the operand that has the shape of x.
    - `params`: the pass's parameters, of all of x.
    """
    # Imported here: programs for one device do not need it.
    from jax.experimental.custom_partitioning import custom_partitioning

    this = _Sharded(compute, vectors, results, full, params)

    def on_shards(*arrays: Shaped[Array, "..."]) -> list[Shaped[Array, "..."]]:
        # XLA never runs this function; only its types matter. It must have no constants.
        function = custom_partitioning(
            lambda *_: [lax.full(r.shape, 0, r.dtype) for r in results]
        )
        function.def_partition(this.partition, sharding_rule=this.rule)
        return function(*arrays, this.fingerprint(arrays))

    return on_shards


class _Sharded(NamedTuple):
    """Holds the arguments of `on_each_shard`."""

    compute: PassOver
    vectors: Sequence[Shape]
    results: Sequence[Aval]
    full: int
    params: dict[str, Any]

    def fingerprint(self, arrays: Sequence[Array]) -> np.int32:
        """Returns a number that stands for the computation and its merges. Errors of the
        computation are raised here, where JAX shows the user's code, and not by XLA."""
        over: list[tuple[str, ...]] = [("devices",) for _ in self.vectors]
        options = self.params.get("options")
        if options is not None and options.kernel:
            over[0] = ()  # a kernel needs whole rows

        def on_two_devices(*arrays: Array) -> Sequence[Array]:
            with without_mesh():
                return list(self.compute(over)(*arrays, **self.params))

        jaxpr = jax.make_jaxpr(on_two_devices, axis_env=[("devices", 2)])(*arrays)
        text = re.sub("0x[0-9a-f]+", "", str(jaxpr))  # without the addresses of functions
        return np.int32(zlib.crc32(text.encode()) >> 1)

    def rule(self, _: Any, operands: Sequence[Any], results: Sequence[Any]) -> Any:
        """Returns Shardy's rule, and the sizes of its factors. Axes at one position are sharded
        alike if their sizes are equal, or if one has a number for each block of the other."""
        shapes = [tuple(t.shape) for t in (*operands, *results)]
        x, vectors, sizes = shapes[self.full], self.vectors[0], {}

        def factor(array: int, axis: int, size: int) -> str:
            is_cut = vectors[axis] not in (1, x[axis])
            if is_cut and size == x[axis]:
                sizes[f"values{axis}"] = x[axis] // vectors[axis]
                if all(shape[axis : axis + 1] != (vectors[axis],) for shape in shapes):
                    sizes[f"blocks{axis}"] = vectors[axis]  # no array has such an axis
                return f"(blocks{axis} values{axis})"
            if is_cut and size == vectors[axis]:
                return f"blocks{axis}"
            if size == x[axis]:
                return f"axis{axis}"
            return f"array{array}_{axis}"

        texts = [
            " ".join(factor(array, axis, size) for axis, size in enumerate(shape))
            for array, shape in enumerate(shapes)
        ]
        n = len(operands)
        return f"{', '.join(texts[:n])} -> {', '.join(texts[n:])}", sizes

    def partition(self, mesh: Any, operands: Sequence[Any], _: Any) -> Any:
        """Returns the mesh, the function of one device's operands, and how results and operands
        are split."""
        given, x = operands[self.full].sharding.spec, operands[self.full].shape
        spec, vectors = self._spec(mesh, x, given), self.vectors[0]

        def split(shape: Shape) -> jax.NamedSharding:
            places: list[tuple[str, ...] | None] = [None for _ in shape]
            for axis, size in enumerate(shape):
                if size > 1 and size in (x[axis], vectors[axis]):
                    places[axis] = spec[axis]
            return jax.NamedSharding(mesh, jax.P(*places))

        def shard_shape(shape: Shape) -> Shape:
            return split(shape).shard_shape(shape)

        def over(shape: Shape) -> tuple[str, ...]:
            summed = [axis for axis, n in enumerate(shape) if n == 1 < x[axis]]
            return tuple(name for axis in summed for name in spec[axis])

        compute = self.compute([*map(over, self.vectors)])
        params = dict(self.params)
        params["layout"] = params["layout"].of_shard(x, shard_shape(x))
        if "shape" in params:
            params["shape"] = shard_shape(params["shape"])
        if "wanted" in params:
            params["wanted"] = params["wanted"].with_shapes(shard_shape)
        shapes = [shard_shape(result.shape) for result in self.results]

        def of_shard(*arrays: Shaped[Array, "..."]) -> list[Shaped[Array, "..."]]:
            *operands, _ = arrays  # without the fingerprint
            with without_mesh():
                values = zip(compute(*operands, **params), shapes, strict=True)
                return [value.reshape(shape) for value, shape in values]

        *arrays, _fingerprint = operands
        of_results = [split(result.shape) for result in self.results]
        of_operands = [split(array.shape) for array in arrays]
        replicated = jax.NamedSharding(mesh, jax.P())
        return mesh, of_shard, of_results, (*of_operands, replicated)

    def _spec(self, mesh: Any, x: Shape, given: jax.P) -> list[tuple[str, ...]]:
        """Returns the names of the mesh axes that split each axis of x, none for one that is
        gathered, because the parts would be uneven or cut a block."""

        def split(axis: int, names: Any) -> tuple[str, ...]:
            if names is None:
                names = ()
            elif not isinstance(names, tuple):
                names = (names,)
            parts = math.prod(mesh.shape[name] for name in names)
            blocks = self.vectors[0][axis]
            size = x[axis] if blocks == 1 else blocks
            return names if size % parts == 0 else ()

        return [split(axis, names) for axis, names in enumerate(given)]
