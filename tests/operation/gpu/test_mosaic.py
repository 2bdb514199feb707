"""Tests what only Mosaic's kernels have: their ring of copies, activations, and GPUs.

The interpreter also tells where a thread might read what is being written, or the reverse.
What it cannot tell, experiments/compiled reads off the compiled code.
"""

import jax
import numpy as np
import pytest

from eqx_norm._normalise.gpu import tiling
from eqx_norm._normalise.gpu.activations import restated
from eqx_norm._normalise.gpu.mosaic import BACKEND, STAGES, Mosaic, plgpu
from eqx_norm._normalise.gpu.tiles import geometry
from experiments.compiled.assembly import unfenced

from .backends import (
    ACTIVATIONS,
    ULP,
    check_statistics,
    check_sums,
    normal,
    operands,
    statistics,
)
from .gpus import needs_mosaic


@needs_mosaic
@pytest.mark.parametrize("cut", ["slices"], indirect=True)
def test_a_merge_of_merges(cut, monkeypatch):
    def small(partials, channels, least):
        return tiling.Tiling(64, 8, 1, 1, -(-partials // 64), 4)

    monkeypatch.setattr(tiling, "merge", small)
    x = normal((2100, 32, 1), mean=3.0)
    assert geometry(x, 1).tiling.slices > 64
    check_statistics(Mosaic(interpret=True), x)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_in_other_words(name):
    """Allows ulps of 1, of u (the exponent of a softplus) or of the derivative itself."""
    u, g = normal((999,)) * 4, normal((999,), seed=1)

    def derivative(u, g):
        return jax.jvp(ACTIVATIONS[name], (u,), (g,))[1]

    expected, got = (np.asarray(jax.jit(f)(u, g)) for f in (derivative, restated(derivative)))
    most = 4 * ULP * np.maximum(np.abs(g) * np.maximum(1, np.abs(u)), np.abs(expected))
    assert np.all((np.abs(got - expected) <= most) | (np.isnan(got) & np.isnan(expected)))


@needs_mosaic
def test_on_a_gpu_of_before(monkeypatch):
    class Device:
        device_kind, compute_capability = "NVIDIA A100-SXM4-80GB", "8.0"

    monkeypatch.setattr(jax, "devices", lambda platform: [Device])
    x, _, (mask,) = operands((8, 32, 1), "float32", masked=True)
    assert "A100" in str(BACKEND.serves(x))
    Device.compute_capability = "10.0"
    assert BACKEND.serves(x) is None
    assert "mask" in str(BACKEND.serves(x, mask))


# --- Races.


@pytest.fixture
def races():
    """Yields the backend that looks for races; after it has found one it is cleaned up."""
    yield Mosaic(plgpu.InterpretGPUParams(detect_races=True))
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    interpret_pallas_call.reset_gpu_interpret_mode_state()


@needs_mosaic
@pytest.mark.parametrize("cut", ["loops", "as it is"], indirect=True)
def test_no_races(cut, races, request):
    x = normal((397, 32, 1))
    if request.node.callspec.params["cut"] == "loops":
        assert geometry(x, 1).tiling.chunks > 2 * STAGES
    else:
        assert geometry(x, 1).tiling.slices > 1  # and a merge
    statistics(races, x)
    check_sums(races, jax.nn.relu, x.shape)


@needs_mosaic
@pytest.mark.parametrize("left_out", ["barrier_wait", "commit_smem"])
@pytest.mark.parametrize("cut", ["loops"], indirect=True)
def test_planted_races_are_found(cut, races, monkeypatch, left_out):
    monkeypatch.setattr(plgpu, left_out, lambda *_: None)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RACE DETECTED"):
        statistics(races, normal((397, 32, 1)))


READ, FENCE, BARRIER, COPY = """
    ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1];
    fence.proxy.async.shared::cta;
    bar.sync %r5, 128;
    cp.async.bulk.tensor.4d.shared::cta.global.mbarrier::complete_tx::bytes [%r6], [%rd2];
""".strip().splitlines()


def test_copies_before_all_have_read():
    """Fails if what experiments/compiled reads off the code would miss a missing fence."""
    assert not unfenced("\n".join([READ, FENCE, BARRIER, COPY] * 2))
    for wrong in ([READ, FENCE, COPY], [READ, BARRIER, COPY], [READ, BARRIER, FENCE, COPY]):
        assert unfenced("\n".join(wrong))
