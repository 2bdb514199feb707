"""Tests Mosaic's ring of copies: where a thread might read what is being written, and so on."""

import jax
import pytest

from eqx_norm._normalise.gpu import mosaic, tiling
from eqx_norm._normalise.gpu.mosaic import STAGES, plgpu
from experiments.compiled.assembly import unfenced

from .backends import HAS_MOSAIC, normal, statistics

needs_mosaic = pytest.mark.skipif(not HAS_MOSAIC, reason="the Mosaic backend takes jax 0.12")
SHAPE = (1, 397, 32)


@pytest.fixture
def races():
    """Yields what looks for races; after it has found one it is cleaned up."""
    yield plgpu.InterpretGPUParams(detect_races=True)
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    interpret_pallas_call.reset_gpu_interpret_mode_state()


@needs_mosaic
@pytest.mark.parametrize("cut", ["loops", "as it is"], indirect=True)
def test_no_races(cut, races):
    tiles = tiling.reading(SHAPE, 4)
    # Slots that are used again; a merge.
    assert tiles.chunks > 2 * STAGES if cut == "loops" else tiles.slices > 1
    statistics(mosaic, normal(SHAPE), races)


@needs_mosaic
@pytest.mark.parametrize("left_out", ["barrier_wait", "commit_smem"])
@pytest.mark.parametrize("cut", ["loops"], indirect=True)
def test_planted_races_are_found(cut, races, monkeypatch, left_out):
    monkeypatch.setattr(plgpu, left_out, lambda *_: None)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RACE DETECTED"):
        statistics(mosaic, normal(SHAPE), races)


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
