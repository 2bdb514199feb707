"""Tests every row of the table in docs/devices.md: what a layer computes, and what it sends."""

import json

import pytest

from tests.compiling import XLA_FLAGS
from tests.processes import on_devices

from . import many, ways

each_way = pytest.mark.parametrize("way", ways.WAYS)
each_case = pytest.mark.parametrize("case", ways.CASES)


@pytest.fixture(scope="module")
def reports():
    return json.loads(on_devices(8, "-m", "tests.devices.ways", flags=XLA_FLAGS).stdout)


@each_case
@each_way
def test_a_step_equals_that_of_one_device(reports, case, way):
    errors = reports[case][way]["errors"]
    assert set(errors) == {"y", "memory", "parameters", "dx"}
    assert max(errors.values()) < 1e-5, errors


@each_case
@each_way
def test_vectors_alone_are_sent_and_together(reports, case, way):
    """Tests how many collectives there are, and that none is of x's size."""
    forward, step = (reports[case][way]["sent"][name] for name in ("forward", "step"))
    partitioned = way in ("jit", "explicit axes", "filter_shard")
    masked = ways.CASES[case].masked
    # Over a mesh, all moments at once, and one sum of gradients. Where XLA splits the program,
    # as many sums as Equinox's layer, and one more to find the first example that counts.
    assert len(forward) == (3 + masked if partitioned else 1), forward
    assert len(step) == len(forward) + 1, step
    vectors = ways.C * (4 * ways.DEVICES if not partitioned else 2)
    assert all(elements <= vectors + 1 for _, elements in step), step


@pytest.fixture(scope="module")
def used():
    return json.loads(on_devices(8, "-m", "tests.devices.uses", flags=XLA_FLAGS).stdout)


@pytest.mark.parametrize("use", ["groups", "each_its_own"])
def test_statistics_are_shared_by_the_devices_that_are_named(used, use):
    assert max(used[use].values()) < 1e-6


def test_one_state_for_different_statistics_is_an_error(used):
    said = used["its_own_of_one_state"]
    assert "differ from device to device along ('devices',)" in said
    assert "make the layer with axis_name=('batch', 'devices')" in said


def test_a_scan_over_micro_batches_inside_shard_map(used):
    assert used["micro_batches"]["all"] < 1e-6


def test_parameters_are_split_over_devices_and_a_donated_state_is_used_up(used):
    report = used["sharded_parameters"]
    assert report["all"] < 1e-6
    assert report["used up"]
    # Parameters are gathered and sums of gradients spread; x stays where it is.
    assert all(elements <= 3 * 2 * ways.DEVICES for _, elements in report["sent"])


def test_layer_norm_sends_nothing_but_gradients_of_its_parameters(used):
    for name, report in used["layer_norm"].items():
        assert report["error"] < 1e-6, name
        sent = [] if name.startswith("forward") else [["all-reduce", 2 * ways.L]]
        assert report["sent"] == sent, name


def test_jit_takes_no_more_collectives_than_equinox_s_layer(used):
    assert used["equinox"]["ours"] <= used["equinox"]["equinox"]


@pytest.fixture(scope="module")
def over_many():
    flags = {"flags": "--xla_backend_optimization_level=0"}
    return {
        devices: json.loads(on_devices(devices, "-m", "tests.devices.many", **flags).stdout)
        for devices in (2, 4, 8, 16, 64)
    }


@pytest.mark.parametrize("devices", [2, 4, 8, 16, 64])
def test_what_is_sent_does_not_grow_with_the_devices(over_many, devices):
    """Tests shards that lie far from each other, of which one channel is constant."""
    report = over_many[devices]
    assert report["error"] < 2e-6
    assert report["constant"] == 0
    sent = dict(report["sent"])
    # Each vector as often as there are devices, if these are few: else once there and back.
    whole, padded = many.C * devices, -(-many.C // devices) * devices
    few, more = {"all-gather": 4 * whole}, {"all-to-all": 4 * padded, "all-gather": 4 * padded}
    assert sent == (few if devices <= 8 else more)


def test_the_program_hardly_grows_with_the_devices(over_many):
    assert over_many[8]["instructions"] < 1.1 * over_many[2]["instructions"]
    # But for operands: XLA:CPU gives each device one of the all-to-all.
    assert over_many[64]["instructions"] < 2 * over_many[16]["instructions"]
