"""`recorded` and `recorded_into`: a step, and what its probes have seen."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.experimental import io_callback
from jaxtyping import ArrayLike, Int

from ._ledger import Ledger
from ._record import Record
from ._stage import stage
from ._staged import Context


def recorded(
    function: Callable[..., Any], *, keep_values: bool = False
) -> Callable[..., tuple[Any, Record]]:
    """`function`, which then returns as well what its probes have seen.

    ```python
    step = eqx.filter_jit(recorded(train_step))
    with Ledger("a.jsonl") as ledger:
        for i in range(100):
            (model, loss), record = step(model, batch(i))
            ledger.append(i, record)
    ```

    There is no callback: the fingerprints are outputs of the program, which is otherwise as it
    was. It goes around the whole step, the part that takes the gradient included, and inside
    of `jit`. (Outside of one it works like the function: what is not jitted runs operation by
    operation, and everything is traced again at each call.)

    The values are unchanged by it, with one reservation: XLA compiles another program now, one
    with more outputs, and where it had merged a multiplication with an addition, it may not do
    so with a probe between them. Compare recorded runs with recorded runs.

    **Arguments:**

    - `function`: takes and returns any trees; it must be possible to trace it, as for
        `jax.jit`. What is no array in its arguments is static.
    - `keep_values`: whether the record takes along the values of all probes, for `compare` to
        tell by how much they differ. That is much memory: meant for a few steps.

    **Returns:** a function of the same arguments, that returns the pair of `function`'s result
    and a `Record`.

    **Raises:** on tracing, `NotImplementedError` for a probe in a `while_loop` or inside of an
    operation that has programs of its own in it (a Pallas kernel for example); `ValueError`
    where it stands inside a derivative.
    """

    @functools.wraps(function)
    def with_record(*args: Any, **kwargs: Any) -> tuple[Any, Record]:
        program: Any = eqx.filter_make_jaxpr(function)(*args, **kwargs)
        jaxpr, outputs, rest = program
        staged = stage(jaxpr, Context(keep_values))
        results = staged.run(*jax.tree.leaves(eqx.filter((args, kwargs), eqx.is_array)))
        output = jax.tree.unflatten(jax.tree.structure(outputs), results.outputs)
        record = Record(results.rows, results.values, staged.plan)
        return eqx.combine(output, rest), record

    # Equinox follows it, takes what it finds for a layer behind `jax.vmap`, and warns.
    del with_record.__wrapped__
    return with_record


def recorded_into(
    ledger: Ledger, function: Callable[..., Any], *, keep_values: bool = False
) -> Callable[..., Any]:
    """`function`, which then writes what its probes have seen into `ledger` by a callback.

    ```python
    with Ledger("a.jsonl") as ledger:
        step = eqx.filter_jit(recorded_into(ledger, train_step))
        for i in range(100):
            model, loss = step(jnp.asarray(i), model, batch(i))
    ```

    For where what a step returns cannot be changed, or where it stands in a `lax.scan` over
    steps. One callback a step brings all its rows, the same as those of `recorded`. Their order
    is that of the program, whenever the callback comes. It takes longer than `recorded`: a
    program with a callback is launched by JAX from Python, which takes a time for each array
    that goes in or out.

    **Arguments:**

    - `ledger`: to be written to, until it is closed; closing it waits for the callbacks.
    - `function`, `keep_values`: as for `recorded`.

    **Returns:** a function of the step's number (an array, lest each step be compiled anew) and
    of `function`'s arguments, that returns `function`'s result.

    **Raises:** as `recorded`; on running, what `Ledger.append` raises.
    """
    with_record = recorded(function, keep_values=keep_values)

    # Not `functools.wraps`: the signature is another one, which `eqx.filter_jit` asks for.
    def into(step: Int[ArrayLike, ""], *args: Any, **kwargs: Any) -> Any:
        output, record = with_record(*args, **kwargs)

        def deliver(step: Any, fingerprints: Any, values: Any) -> None:
            values = tuple(map(np.asarray, values))
            ledger.write(int(step), record.plan, np.asarray(fingerprints), values)

        io_callback(deliver, None, step, record.fingerprints, record.values)
        return output

    return into
