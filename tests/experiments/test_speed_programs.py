"""Tests the programs to be timed, and how they are timed.

That they agree is tested by running the experiment, which has a claim on it.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.lab import timer
from experiments.lab.peers import Layer, names
from experiments.lab.timer import Program
from experiments.speed import agreement, measure, programs, training
from experiments.speed.agreement import TOLERANCE
from experiments.speed.cases import BOTH, FORWARD, GPU, KERNELS, LAST, OWN, ROWS, Problem
from experiments.speed.programs import How

IMAGES, TABLE = (6, 5, 4, 3), (16, 5)
OURS = Problem(IMAGES, "f32", OWN)


@pytest.mark.parametrize("name", [names.OURS_INVARIANT, names.EQUINOX_BATCH])
@pytest.mark.parametrize(("shape", "layout"), [(TABLE, OWN), (IMAGES, LAST)])
def test_forward_gives_the_y_that_is_compared(name, shape, layout):
    problem = Problem(shape, "f32", layout)
    case = agreement.case(problem, programs.given_shape(name, problem))
    found = programs.answer(name, problem, case.given, How())
    assert case.deviation(found) <= TOLERANCE["f32"]
    forward = programs.built(name, problem, FORWARD, How())
    affine = jnp.asarray(case.given.weight), jnp.asarray(case.given.bias)
    ((y, _),) = forward.call(affine, forward.memory, [(jnp.asarray(case.given.x),)], None)
    np.testing.assert_allclose(y, found.y, atol=TOLERANCE["f32"])


@pytest.mark.parametrize("layout", [OWN, ROWS])
def test_disagreement_is_seen(layout):
    problem = Problem(TABLE, "f32", layout)
    case = agreement.case(problem, TABLE)
    right = programs.answer(names.OURS, problem, case.given, How())
    assert case.deviation(right) <= TOLERANCE["f32"]
    for field in ("y", "dx", "dweight", "dbias"):
        for wrong in (1.01, math.nan):
            found = right._replace(**{field: wrong * getattr(right, field)})
            assert case.deviation(found) > TOLERANCE["f32"], field


def test_a_stack_is_one_layer_after_the_other():
    made = programs.layer(names.OURS, OURS)
    affine = 1 + jnp.arange(5.0), jnp.arange(5.0)
    x = given = jax.random.normal(jax.random.key(0), IMAGES)
    for _ in range(3):
        mixed = jnp.einsum("nchw,c,d->ndhw", x, affine[0], affine[0]) / 5
        x, _ = made.train(affine, made.memory, mixed)
    stack = programs.stack(made, 3, 1)
    affines: Any = (affine,) * 3
    y, memory = stack.train(affines, stack.memory, given)
    np.testing.assert_allclose(y, x, rtol=1e-5, atol=1e-5)
    assert len(memory) == 3


@pytest.mark.parametrize("how", [How(in_place=True), How(2, True, True)], ids=str)
def test_results_written_over_those_of_the_call_before_are_the_same(how):
    """Memory does not move from call to call, so nothing is left to the allocator."""
    call, memory, _ = programs.built(names.OURS, OURS, BOTH, How())
    affine, given = programs.unit_affine(5), programs.drawn(IMAGES, "f32", how.instances)
    right = [call(affine, memory, [arrays], None)[0] for arrays in given]
    program = programs.program(names.OURS, OURS, BOTH, how)
    assert program.instances == how.instances
    places = set()
    for _ in range(3):
        results = program.wait(program.call())
        for a, b in zip(jax.tree.leaves(results), jax.tree.leaves(right), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        places.add(tuple(y.unsafe_buffer_pointer() for y, _, _ in results))
    assert len(places) == 1


def test_temporaries_are_those_of_the_program():
    x = jnp.zeros((512, 512))
    # One product is needed whole before the next.
    seconds, needed = measure.compiled(lambda x: (x @ x) @ x, (x,))
    assert needed >= x.nbytes > 10 * measure.compiled(lambda x: -x, (x,))[1]
    assert seconds > 0


def test_a_bit_that_differs_is_counted():
    calls = iter(range(10))
    x, dy = jnp.ones(3, jnp.bfloat16), jnp.zeros(3)

    def run():
        # The third call, and the sixth, is off by the sign of a zero.
        return [(x, [jnp.int32(1)], (-dy if next(calls) % 3 == 2 else dy,))]

    assert measure.differing(run, 7) == [0, 2]


def test_the_network_has_the_arrays_of_a_resnet():
    found = []

    def train(affine, memory, x):
        found.append(x.shape[1:])
        return x, memory

    network = [(conv, Layer((), train, train)) for conv in training.convolutions(GPU.network)]
    weights = jax.eval_shape(lambda: training.initial(GPU.network, "bf16"))
    images = jax.ShapeDtypeStruct(training.problem(GPU.network, "bf16").shape, jnp.bfloat16)
    nothing = [()] * len(network)
    logits, _ = jax.eval_shape(partial(training.logits, network), weights, nothing, images)
    assert (logits.shape, logits.dtype) == ((128, 1000), jnp.float32)
    assert len(found) == 17
    assert {(64, 112, 112), (256, 56, 56), (2048, 7, 7)} <= set(found)


@pytest.mark.parametrize("wait_for_each", [True, False])
def test_timings_are_interleaved_and_what_raises_stops_no_other(wait_for_each):
    calls: list[str] = []

    def called(name, most=math.inf):
        calls.append(name)
        if calls.count(name) > most:
            raise RuntimeError(f"out of memory after {most}")

    made = {
        name: Program(partial(called, name, most), lambda _: None, instances=2)
        for name, most in (("a", math.inf), ("b", math.inf), ("never", 0), ("breaks", 9))
    }
    told = {}
    times = timer.interleave(
        made,
        4,
        wait_for_each=wait_for_each,
        failed=lambda name, error: told.update({name: str(error)}),
    )
    assert told == {"never": "out of memory after 0", "breaks": "out of memory after 9"}
    assert list(times) == ["a", "b"]
    for name, (seconds, count, host) in times.items():
        assert len(seconds) == len(host) == 4
        # A call takes far less than LEAST: many of them are one timing.
        assert 1 < count <= timer.MOST_CALLS
        assert all(0 < s < timer.LEAST for s in seconds)
        assert np.isnan(host).all() if wait_for_each else (host > 0).all()
        assert calls.count(name) >= (4 + timer.WARM_UPS) * (1 + count)
    with pytest.raises(RuntimeError, match="out of memory"):
        timer.interleave(made, 4)


def test_what_takes_long_to_compile_is_there_where_it_matters():
    small, large = (Problem(s, "f32", LAST) for s in ((32, 512, 7, 7), (256, 64, 112, 112)))
    slow = {*KERNELS, names.TORCH_COMPILED}
    assert slow.isdisjoint(GPU.entered(large, FORWARD))
    assert slow & set(GPU.entered(small)) == set(KERNELS)
    assert slow <= set(GPU.entered(large))
