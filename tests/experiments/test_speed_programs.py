"""Tests the programs to be timed, and how they are timed.

That they agree is tested by running the experiment, which has a claim on it.
"""

import math
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.lab import timer
from experiments.lab.peers import Layer, names
from experiments.lab.timer import Program
from experiments.speed import agreement, compiling, measure, networks, programs, training
from experiments.speed.agreement import TOLERANCE
from experiments.speed.cases import (
    BOTH,
    COLD,
    FORWARD,
    GPU,
    HOT,
    INFERENCE,
    LAST,
    OWN,
    ROWS,
    Job,
    Problem,
)
from experiments.speed.programs import How
from tests.compiling import jit

IMAGES, TABLE = (6, 5, 4, 3), (16, 5)
OURS = Problem(IMAGES, "f32", OWN)


@pytest.mark.parametrize("name", [names.OURS, names.EQUINOX_BATCH])
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


@pytest.mark.parametrize("name", [names.OURS_SEPARATE, names.EQUINOX_BATCH])
def test_inference_is_that_of_a_finite_memory(name):
    program = programs.program(name, OURS, INFERENCE, How())
    (y,) = program.call()
    assert jnp.isfinite(y).all()
    assert (y >= 0).all()  # the ReLU


# What is compiled.


@pytest.mark.parametrize(
    ("network", "norms", "distinct"),
    [(networks.resnet_18, 20, 4), (networks.mobilenet_v2, 22, None), (networks.stack, 50, 1)],
)
def test_the_networks_have_as_many_norms(network, norms, distinct):
    made: list[int] = []

    def norm(channels):
        made.append(channels)
        return eqx.nn.Identity()

    eqx.filter_eval_shape(network, norm)  # draws no weights
    assert len(made) == norms
    assert distinct in (None, len(set(made)))


@pytest.mark.parametrize("name", [names.OURS_SEPARATE, names.EQUINOX_BATCH])
def test_a_training_step_normalises_and_has_every_gradient(name):
    shape = (4, 3, 5, 5)
    network = partial(networks.pre_activation, channels=3, blocks=2)
    step, arguments = networks.training_step(network, name, shape)
    x = jax.random.normal(jax.random.key(0), shape)
    (parameters, state, _) = jax.tree.map(lambda v: jnp.ones(v.shape, v.dtype), arguments)
    (_, after), (gradients, dx) = jit(step)(parameters, state, x)
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), after, state)
    assert any(jax.tree.leaves(changed))
    leaves = [*jax.tree.leaves(gradients), dx]
    assert len(leaves) == 2 * 3 + 1  # of each block weight, bias and convolution
    assert all(jnp.isfinite(leaf).all() and (leaf != 0).any() for leaf in leaves)


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
    x = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    # One product is needed whole before the next.
    products = compiling.compiled(lambda: (lambda x: (x @ x) @ x, (x,)))
    negative = compiling.compiled(lambda: (lambda x: -x, (x,)))
    size = 4 * 512 * 512
    assert products.temporaries >= size > 10 * negative.temporaries
    assert 2 * size <= negative.moved < products.moved
    assert 0 < products.trace + products.lower < products.in_all


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


def test_a_cold_timing_is_of_one_call_after_what_fills_the_caches():
    done: list[str] = []
    made = {
        name: Program(partial(done.append, name), evict=partial(done.append, f"evict {name}"))
        for name in "ab"
    }
    times = timer.interleave(made, 3, cold=True)
    assert all(taken.calls == 1 for taken in times.values())
    rounds = 3 + timer.WARM_UPS
    timed = done[-4 * rounds :]
    assert all(timed[i] == f"evict {timed[i + 1]}" for i in range(0, 4 * rounds, 2))
    assert timed.count("a") == timed.count("b") == rounds


def test_what_evicts_is_larger_than_any_cache():
    assert 4 * timer.EVICTING > timer.largest_cache() >= 2**20
    Program(lambda: None).evict()


def test_what_is_timed_on_a_cpu():
    """Each distinct norm of the networks; where x is large, in fewer rounds."""
    job = Job()
    assert len(set(job.shapes)) == len(job.shapes) == 36
    assert (job.passes, job.caches) == ((BOTH, INFERENCE), (HOT, COLD))
    rounds = {p.shape: job.rounds_of(p) for p in job.batch_norms(job.shapes)}
    assert (rounds[32, 96, 112, 112], rounds[256, 256]) == (job.fewest, job.rounds)
    in_bf16 = {p.shape for p in job.batch_norms(job.shapes) if p.dtype == "bf16"}
    assert in_bf16 < job.few
    assert names.OURS_SEPARATE not in job.entered(Problem((256, 256), "f32", OWN), INFERENCE)


def test_what_takes_long_to_compile_is_there_where_it_matters():
    small, large = (Problem(s, "f32", LAST) for s in ((32, 512, 7, 7), (256, 64, 112, 112)))
    slow = {names.OURS_PALLAS, names.TORCH_COMPILED}
    assert slow.isdisjoint(GPU.entered(large, FORWARD))
    assert slow & set(GPU.entered(small)) == {names.OURS_PALLAS}
    assert slow <= set(GPU.entered(large))
