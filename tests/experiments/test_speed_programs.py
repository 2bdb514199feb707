"""Tests that the programs to be timed agree, and how they are timed."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.lab import timer
from experiments.lab.peers import names
from experiments.lab.timer import Program
from experiments.speed import agreement, parts, programs, training
from experiments.speed.cases import (
    BOTH,
    DTYPES,
    EQUINOX,
    FIRST,
    FLAX,
    FORWARD,
    GPU,
    IN_TORCH,
    LAST,
    OWN,
    ROWS,
    Problem,
)
from experiments.speed.programs import How

IMAGES, TABLE = (6, 5, 4, 3), (16, 5)
OURS = Problem(IMAGES, "f32", OWN)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [IMAGES, TABLE], ids=str)
def test_peers_of_jax_agree(shape, dtype):
    batch_norms = [names.OURS, names.OURS_INVARIANT, *EQUINOX]
    assert_agreement(batch_norms, Problem(shape, dtype, OWN))
    if shape == IMAGES:  # as on a GPU
        assert_agreement((names.OURS, names.EQUINOX_BATCH), Problem(shape, dtype, LAST))
    else:
        assert_agreement((names.OURS, names.EQUINOX), Problem(shape, dtype, ROWS))


@pytest.mark.peers
@pytest.mark.filterwarnings("default")  # the peers' own, of what they import
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", [OWN, FIRST, LAST, ROWS])
def test_other_peers_agree(layout, dtype):
    from experiments.speed import in_torch

    problem = Problem(TABLE if layout == ROWS else IMAGES, dtype, layout)
    assert_agreement(FLAX if layout != ROWS else (names.LINEN,), problem)
    given = agreement.numbers(problem)
    exact = agreement.Agreement(given, problem)
    made = in_torch.program(names.TORCH, problem, BOTH, How(2))
    assert (made.instances, len(made.wait(made.call()))) == (2, 2)
    found = in_torch.answer(names.TORCH, problem, given, How())
    assert exact.deviation(found) <= exact.tolerance


def assert_agreement(entered, problem):
    given = agreement.numbers(problem)
    exact = agreement.Agreement(given, problem)
    for name in entered:
        if name == names.EQUINOX_EMA and problem.dtype == "bf16":
            continue
        found = programs.answer(name, problem, given, How())
        assert exact.deviation(found) <= exact.tolerance, name
        # What is timed as forward is the same y.
        forward = programs.built(name, problem, FORWARD, How())
        affine = jnp.asarray(given.weight), jnp.asarray(given.bias)
        x = programs.placed(name, problem, given.x)
        ((y, _),) = forward.call(affine, forward.memory, [(x,)], None)
        y = programs.back(name, problem, y)
        np.testing.assert_allclose(y, found.y, atol=exact.tolerance)


@pytest.mark.parametrize("layout", [OWN, ROWS])
def test_disagreement_is_seen(layout):
    problem = Problem(TABLE, "f32", layout)
    given = agreement.numbers(problem)
    exact = agreement.Agreement(given, problem)
    right = programs.answer(names.OURS, problem, given, How())
    for field in ("y", "dx", "dweight", "dbias"):
        for wrong in (1.01, math.nan):
            found = right._replace(**{field: wrong * getattr(right, field)})
            assert exact.deviation(found) > exact.tolerance, field


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
    call, memory, affine, _, _ = programs.built(names.OURS, OURS, BOTH, How())
    given = programs.drawn(IMAGES, "f32", how.instances)
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
    seconds, needed = parts.compiled(lambda x: (x @ x) @ x, (x,))
    _, none = parts.compiled(lambda x: -x, (x,))
    assert needed >= x.nbytes
    assert none < 0.1 * x.nbytes
    assert seconds > 0


def test_a_bit_that_differs_is_counted():
    calls = iter(range(10))
    x, dy = jnp.ones(3, jnp.bfloat16), jnp.zeros(3)

    def run():
        # The third call, and the sixth, is off by the sign of a zero.
        return [(x, [jnp.int32(1)], (-dy if next(calls) % 3 == 2 else dy,))]

    assert parts.differing(run, 7) == [("forward", 0.0), ("backward", 2.0)]


def test_the_network_has_the_arrays_of_a_resnet():
    linear = eqx.filter_eval_shape(training.initial, GPU.network, jnp.bfloat16)
    found = []

    def spied(layer, conv, i):
        def train(affine, memory, x):
            found.append((conv.out_channels, *x.shape[2:]))
            return layer.train(affine, memory, x)

        return layer._replace(train=train)

    made = training.norms(names.OURS, linear)
    layers = [spied(*each) for each in zip(made, linear.convolutions, range(99), strict=False)]
    size = GPU.network.image
    images = jax.ShapeDtypeStruct((2, 3, size, size), jnp.bfloat16)
    affines = [(jnp.ones(c.out_channels),) * 2 for c in linear.convolutions]
    memories = [layer.memory for layer in layers]
    logits = eqx.filter_eval_shape(training.logits, layers, linear, affines, memories, images)
    assert (logits[0].shape, logits[0].dtype) == ((2, 1000), jnp.float32)
    assert len(found) == 17
    assert {(64, 112, 112), (256, 56, 56), (2048, 7, 7)} <= set(found)


def test_a_block_has_no_relu_before_and_beside_its_sum():
    linear = eqx.filter_eval_shape(training.initial, GPU.network, jnp.float32)
    below = []
    layers = training.norms(names.OURS, linear)[:5]
    for layer, conv in zip(layers, linear.convolutions, strict=False):
        channels = conv.out_channels
        x = jnp.zeros((2, channels, 1)).at[0].set(-1.0)
        y, _ = layer.train((jnp.ones(channels), jnp.zeros(channels)), layer.memory, x)
        below.append(bool((y < 0).any()))
    assert below == [False, False, False, True, True]


# Timing.


def recorded(calls, name):
    return Program(lambda: calls.append(name), lambda result: result, instances=2)


@pytest.mark.parametrize("wait_for_each", [True, False])
def test_timings_are_interleaved_and_of_one_instance(wait_for_each):
    calls: list[str] = []
    made = {name: recorded(calls, name) for name in "ab"}
    times = timer.interleave(made, 4, seed=1, wait_for_each=wait_for_each)
    rounds = 4 + timer.WARM_UPS
    for name in "ab":
        seconds, count, host = times[name]
        assert len(seconds) == len(host) == 4
        # A call takes far less than LEAST: many of them are one timing.
        assert 1 < count <= timer.MOST_CALLS
        assert all(0 < s < timer.LEAST for s in seconds)
        assert np.isnan(host).all() if wait_for_each else (host > 0).all()
        assert calls.count(name) >= rounds * (1 + count)


def test_what_raises_stops_no_other_where_somebody_is_told():
    left = iter(range(10))

    def breaks():
        if next(left) == 9:
            raise RuntimeError("out of memory")

    def broken():
        raise ValueError("no such layer")

    made = {"steady": Program(list), "broken": Program(broken), "breaks": Program(breaks)}
    told = {}
    times = timer.interleave(
        made, 3, least=0.0, failed=lambda key, error: told.update({key: str(error)})
    )
    assert list(times) == ["steady"]
    assert times["steady"].calls == 1
    assert told == {"broken": "no such layer", "breaks": "out of memory"}
    with pytest.raises(ValueError, match="no such layer"):
        timer.interleave(made, 3)


def test_programs_outlast_the_cache_and_the_launch():
    whole = [*GPU.batch_norms(GPU.shapes), *GPU.layer_norms(GPU.rows)]
    assert len(whole) == 18 * 2 * 2 + 6 * 2
    work = parts.Parts(GPU, None)  # pyright: ignore[reportArgumentType]
    for problem in whole:
        instances = work._how(problem).instances
        # x, dy, y and dx, beside the 60 MB of an H200's L2.
        assert 4 * instances * problem.bytes > 120e6
        size = math.prod(programs.given_shape(names.OURS, problem))
        assert size == math.prod(problem.shape)


def test_what_takes_long_to_compile_is_there_where_it_matters():
    small, large = (Problem(s, "f32", LAST) for s in ((32, 512, 7, 7), (256, 64, 112, 112)))
    kernels = [names.OURS_TRITON, names.OURS_MOSAIC]
    ours, peers = [names.OURS, names.OURS_XLA], [names.EQUINOX_BATCH, names.LINEN]
    assert GPU.entered(small, FORWARD) == [*ours, *peers, names.TORCH]
    assert GPU.entered(small) == [*ours, *kernels, *peers, names.TORCH]
    assert GPU.entered(large) == [*ours, *kernels, *peers, *IN_TORCH]
