"""Computes a pass over x on each device's share of x, in a program that XLA splits.

XLA splits its own operations, but gathers x for a kernel, and cannot split the forms of
`on_cpu` and `on_gpu`. `jax.experimental.custom_partitioning` calls `_Pass.partition` when XLA
has decided how the operands are split: each device then runs the form that one device would
run, and vectors alone are sent.

The compiled program names the Python function by its address, so JAX's persistent cache of
compiled programs misses, unless `jax_remove_custom_partitioning_ptr_from_cache_key` is set. Two
passes on the same shapes are then told apart by a number, `_Pass.fingerprint`.
"""

import math
import re
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jaxtyping import Array

from .layout import Blocks
from .lowering import Aval, without_mesh
from .reference import Shape

# Merges the results of shares of x over the named mesh axes.
Merge = Callable[[Sequence[Array], tuple[str, ...]], Sequence[Array]]


def summed(sums: Sequence[Array], axes: tuple[str, ...]) -> Sequence[Array]:
    """Returns the sums over all devices along the axes."""
    # One by one: stacking would write the gradients of weights, as long as a row, once more.
    return lax.psum(list(sums), axes)


def summed_but_first(results: Sequence[Array], axes: tuple[str, ...]) -> Sequence[Array]:
    """Returns y or dx, which each device keeps its share of, and the sums, if any."""
    first, *sums = results
    return [first, *(summed(sums, axes) if sums else [])]


def computed_on_shares(
    compute: Callable[..., Sequence[Array]],
    merge: Merge,
    results: Sequence[Aval],
    full: int,
    *,
    whole_rows: bool,
    blocks: Blocks,
    shape: Shape | None = None,
    **static: Any,
) -> Callable[..., list[Array]]:
    """Returns a function of the operands of a pass that computes `results` on each device.

    **Arguments:**

    - `compute`: the pass, of the operands, `blocks`, `shape` and `static`.
    - `merge`: merges the devices' results over the mesh axes that split an axis of x along
        which vectors have size 1.
    - `full`: the operand that has the shape of x.
    - `whole_rows`: whether the values of a group must be on one device.
    """
    # Imported here: programs for one device do not need it.
    from jax.experimental.custom_partitioning import custom_partitioning

    this = _Pass(compute, merge, results, full, whole_rows, blocks, shape, static)

    def on_shares(*arrays: Array) -> list[Array]:
        # XLA never runs this function; only its types matter. It must have no constants.
        function = custom_partitioning(
            lambda *_: [lax.full(r.shape, 0, r.dtype) for r in results]
        )
        function.def_partition(this.partition, sharding_rule=this.rule)
        return function(*arrays, this.fingerprint(arrays))

    return on_shares


class _Pass(NamedTuple):
    """Holds the arguments of `computed_on_shares`."""

    compute: Callable[..., Sequence[Array]]
    merge: Merge
    results: Sequence[Aval]
    full: int
    whole_rows: bool
    blocks: Blocks
    shape: Shape | None
    static: dict[str, Any]

    def fingerprint(self, arrays: Sequence[Array]) -> np.int32:
        """Returns a number that stands for the computation and the merge. Errors of the
        computation are raised here, where JAX shows the user's code, and not by XLA."""
        shape = {} if self.shape is None else {"shape": self.shape}

        def merged(*arrays: Array) -> Sequence[Array]:
            with without_mesh():
                values = self.compute(*arrays, blocks=self.blocks, **shape, **self.static)
                return self.merge(list(values), ("devices",))

        jaxpr = jax.make_jaxpr(merged, axis_env=[("devices", 2)])(*arrays)
        text = re.sub("0x[0-9a-f]+", "", str(jaxpr))  # without the addresses of functions
        return np.int32(zlib.crc32(text.encode()) >> 1)

    def rule(self, _: Any, operands: Sequence[Any], results: Sequence[Any]) -> Any:
        """Returns Shardy's rule. Axes of one size are split alike. If an axis of vectors has
        one number for each block of an axis of x, the blocks are split alike."""
        shapes = [tuple(t.shape) for t in (*operands, *results)]
        x, sizes = shapes[self.full], {}
        vectors = self.shape or x

        def factor(array: int, axis: int, size: int) -> str:
            is_cut = vectors[axis] not in (1, x[axis])
            if is_cut and size == x[axis]:
                sizes[f"values{axis}"] = x[axis] // vectors[axis]
                return f"(blocks{axis} values{axis})"
            if is_cut and size == vectors[axis]:
                return f"blocks{axis}"
            return f"axis{axis}" if size == x[axis] else f"array{array}_{axis}"

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
        vectors = self.shape or x
        spec = [self._split(mesh, x, axis, names) for axis, names in enumerate(given)]

        def split(shape: Shape) -> jax.NamedSharding:
            places = [
                names if size > 1 and size in (x[axis], vectors[axis]) else None
                for axis, (names, size) in enumerate(zip(spec, shape, strict=True))
            ]
            return jax.NamedSharding(mesh, jax.P(*places))

        along = [axis for axis, n in enumerate(vectors) if n == 1 < x[axis]]
        over = tuple(name for axis in along for name in spec[axis])
        local = self.static | {"blocks": self._local(x, split(x).shard_shape(x))}
        if self.shape is not None:
            local["shape"] = split(self.shape).shard_shape(self.shape)
        places = [split(result.shape) for result in self.results]
        shapes = [p.shard_shape(r.shape) for p, r in zip(places, self.results, strict=True)]

        def of_share(*arrays: Array) -> list[Array]:
            *operands, _ = arrays  # without the fingerprint
            with without_mesh():
                values = zip(self.compute(*operands, **local), shapes, strict=True)
                found = [value.reshape(shape) for value, shape in values]
                return list(self.merge(found, over) if over else found)

        whole = jax.NamedSharding(mesh, jax.P())
        return mesh, of_share, places, (*(split(a.shape) for a in operands[:-1]), whole)

    @property
    def _is_cut(self) -> bool:
        return self.blocks.ndim > 0 and self.blocks.number > 1

    def _local(self, x: Shape, share: Shape) -> Blocks:
        """Returns the blocks of a share of x."""
        first = len(x) - self.blocks.ndim
        parts = x[first] // share[first] if self._is_cut else 1
        return self.blocks._replace(number=self.blocks.number // parts)

    def _split(self, mesh: Any, x: Shape, axis: int, names: Any) -> tuple[str, ...]:
        """Returns the names of the mesh axes that split an axis of x, none if it is gathered,
        because the parts would be uneven."""
        names = names if isinstance(names, tuple) else (names,) if names else ()
        parts = math.prod(mesh.shape[name] for name in names)
        first = len(x) - self.blocks.ndim
        cuts_blocks = axis == first and self._is_cut
        is_even = (self.blocks.number if cuts_blocks else x[axis]) % parts == 0
        if self.whole_rows and parts > 1 and axis >= first and not (cuts_blocks and is_even):
            raise ValueError(
                "implementation='pallas' needs whole rows on each device, and the mesh splits "
                "the values of a row. Split the batch, or use implementation='auto'."
            )
        return names if is_even else ()
