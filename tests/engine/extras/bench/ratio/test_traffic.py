"""Bytes that convolutions fetch from L2 follow from their tiles."""

from zerowaste_vae.engine.extras.bench.ratio import traffic
from zerowaste_vae.engine.kernels.prebuilt.launch import Prebuilt

#: 3x3x3, 128 channels, a step of 32 with three taps of a row: tiles of 256 positions x 128 outputs.
CONSTANTS = {"KT": 3, "KH": 3, "KW": 1, "RUN": 128, "BM": 256, "BN": 128, "TAIL": 0, "SHARE": 3}


def test_a_tile_copies_positions_once_and_weights_for_every_tap():
    positions, weights = 9 * 128 * (256 + 32), 27 * 128 * 128
    assert traffic.fetched((5, 2), CONSTANTS, 2) == 10 * 2 * (positions + weights)
    alone = CONSTANTS | {"KW": 3, "SHARE": 1, "TAIL": 64}
    assert traffic.fetched((1,), alone, 1) == 27 * 128 * (256 + 128 + 64)


def test_launches_are_counted_inside_alone(monkeypatch):
    import torch

    ran = []
    monkeypatch.setattr(Prebuilt, "_launch", lambda self, grid, *_, **__: ran.append(grid))
    before = Prebuilt._launch
    weights = torch.zeros(1, dtype=torch.int8)
    with traffic.counting() as total:
        Prebuilt("conv3d.mma_kernel", "C")[(4,)](None, weights, **CONSTANTS)
        Prebuilt("norm_act.norm_act_kernel", "C")[(9,)](None, BLOCK=1)
        assert total() == traffic.fetched((4,), CONSTANTS, 1)
    assert ran == [(4,), (9,)] and Prebuilt._launch is before
