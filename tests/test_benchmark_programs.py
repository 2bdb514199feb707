"""What the benchmark times is what it says: programs that agree, and how they are timed."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import (
    benchmark_agreement,
    benchmark_cases,
    benchmark_compiled,
    benchmark_growth,
    benchmark_layers,
    benchmark_timing,
    benchmark_torch,
)
from experiments.benchmark_layers import BOTH, EQUINOX, FLAX, INVARIANT, OURS


@pytest.mark.parametrize("shape", [(6, 5, 4, 3), (16, 5)], ids=str)
@pytest.mark.parametrize("dtype", benchmark_layers.DTYPES)
def test_contestants_agree(shape, dtype):
    assert_agreement((OURS, INVARIANT, *EQUINOX), shape, dtype)


@pytest.mark.peers
@pytest.mark.filterwarnings("default")  # the peers' own, of what they import
@pytest.mark.parametrize("shape", [(6, 5, 4, 3), (16, 5)], ids=str)
@pytest.mark.parametrize("dtype", benchmark_layers.DTYPES)
def test_peers_agree(shape, dtype):
    agreement = assert_agreement(FLAX, shape, dtype)
    given = benchmark_cases.numbers(shape)
    result = benchmark_torch.programs(given, dtype)[BOTH].call()
    deviation = agreement.deviation(benchmark_torch.outputs(result))
    assert deviation <= agreement.tolerance


def assert_agreement(names, shape, dtype):
    given = benchmark_cases.numbers(shape)
    agreement = benchmark_agreement.Agreement(given, dtype)
    for name in names:
        if dtype in benchmark_layers.JAX_LAYERS[name].dtypes:
            case = benchmark_cases.case(name, given, dtype)
            outputs = case.outputs(case.program(BOTH).call())
            assert agreement.deviation(outputs) <= agreement.tolerance, name
            # What is timed as forward is the same y.
            y = case.program("forward").call()[0]
            y = np.moveaxis(y, -1, 1) if case.channels_last else y
            np.testing.assert_allclose(
                np.asarray(y, np.float32), outputs.y, atol=agreement.tolerance
            )
    return agreement


def test_disagreement_is_seen():
    given = benchmark_cases.numbers((6, 5, 4, 3))
    agreement = benchmark_agreement.Agreement(given, "f32")
    case = benchmark_cases.case(OURS, given, "f32")
    right = case.outputs(case.program(BOTH).call())
    for field in right._fields:
        for wrong in (1.01, math.nan):
            outputs = right._replace(**{field: wrong * getattr(right, field)})
            assert agreement.deviation(outputs) > agreement.tolerance, field


def test_a_stack_is_one_layer_after_the_other():
    given = benchmark_cases.numbers((6, 5, 4, 3))
    x = given.x
    for _ in range(3):
        mixed = benchmark_layers.mixed(jnp.asarray(x), jnp.asarray(given.weight), 1)
        one = benchmark_cases.case(OURS, given._replace(x=np.asarray(mixed)), "f32")
        x = np.asarray(one.program("forward").call()[0])
    stack = benchmark_cases.case(OURS, given, "f32", depth=3).program("forward").call()
    np.testing.assert_allclose(stack[0], x, rtol=1e-5, atol=1e-5)


def test_timings_are_interleaved_and_per_call():
    calls: list[str] = []

    def program(name: str) -> benchmark_layers.Program:
        return benchmark_layers.Program(lambda: calls.append(name), lambda result: result)

    # A call of a list method takes far less than LEAST: many of them are one timing.
    programs = {name: program(name) for name in "ab"}
    times = benchmark_timing.interleave(programs, 4, seed=1)
    assert [len(t.seconds) for t in times.values()] == [4, 4]
    assert all(0 < s < benchmark_timing.LEAST for t in times.values() for s in t.seconds)
    rounds = 4 + benchmark_timing.WARM_UPS
    for name in "ab":
        assert calls.count(name) >= rounds * (1 + times[name].calls)


def test_temporaries_are_those_of_the_program():
    x = jnp.zeros((512, 512))
    # One product is needed whole before the next.
    needs = benchmark_compiled.compiled(lambda x: (x @ x) @ x, (x,))
    none = benchmark_compiled.compiled(lambda x: -x, (x,))
    assert needs.temporaries >= x.nbytes
    assert none.temporaries < 0.1 * x.nbytes
    assert needs.seconds > 0


def test_results_written_over_those_of_the_call_before_are_the_same():
    """The same arithmetic, in memory that does not move: nothing is left to the allocator."""
    case = benchmark_cases.case(OURS, benchmark_cases.numbers((6, 5, 4, 3)), "f32")
    right = case.program(BOTH).call()
    program = benchmark_growth.in_place(case)
    places = []
    for _ in range(3):
        result = program.wait(program.call())
        y, _, (_, dx) = result
        places.append((y.unsafe_buffer_pointer(), dx.unsafe_buffer_pointer()))
        for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(right), strict=True):
            np.testing.assert_array_equal(a, b)
    assert len(set(places)) == 1
