"""`recorded` traces a step, and returns what its probes have seen as well.

It traces the step, with all its derivatives and maps, into the program that JAX is going to
run, and `_rules` evaluates that equation by equation. So the rows have the order of the
program, forward before backward; no transformation can miss a probe or pass it twice; and no
callback is needed.
"""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.experimental import io_callback
from jaxtyping import ArrayLike, Int

from ._ledger import Ledger
from ._record import Record
from ._rules import Context, stage


def recorded(
    function: Callable[..., Any], *, keep_values: bool = False
) -> Callable[..., tuple[Any, Record]]:
    """Returns `function`, changed to return what its probes have seen as well.

    ```python
    step = eqx.filter_jit(recorded(train_step))
    with Ledger("a.jsonl") as ledger:
        for i in range(100):
            (model, loss), record = step(model, batch(i))
            ledger.append(i, record)
    ```

    The fingerprints are outputs of the program; there is no callback. `recorded` goes around
    the whole step, including the part that takes the gradient, and inside of `jit`, outside of
    which everything is traced again at each call.

    Compare recorded runs with recorded runs: with more outputs, XLA may not merge a
    multiplication with an addition where a probe is between them.

    **Arguments:**

    - `function`: takes and returns any trees, and can be traced by `jax.jit`. Arguments that
        are no arrays are static.
    - `keep_values`: whether the record has the values of all probes, from which `compare` tells
        by how much they differ. It takes much memory, and is meant for a few steps.

    **Returns:** a function of the same arguments, which returns the pair of `function`'s result
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
        record = Record(jnp.asarray(results.rows), results.values, staged.plan)
        return eqx.combine(output, rest), record

    # Equinox follows it, takes what it finds for a layer behind `jax.vmap`, and warns.
    del with_record.__wrapped__
    return with_record


def recorded_into(
    ledger: Ledger, function: Callable[..., Any], *, keep_values: bool = False
) -> Callable[..., Any]:
    """Returns `function`, changed to write what its probes have seen into `ledger`, by a
    callback.

    ```python
    with Ledger("a.jsonl") as ledger:
        step = eqx.filter_jit(recorded_into(ledger, train_step))
        for i in range(100):
            model, loss = step(jnp.asarray(i), model, batch(i))
    ```

    Use it where what a step returns cannot be changed, or in a `lax.scan` over steps. One
    callback a step writes the rows that `recorded` would return. It takes longer: JAX launches
    a program with a callback from Python, which takes a time for each array in or out.

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
        io_callback(ledger.append, None, step, record)
        return output

    return into
