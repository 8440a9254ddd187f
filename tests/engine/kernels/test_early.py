"""A clip's first two frames through weights with fewer taps in time."""

import pytest
import torch
from zerowaste_vae.engine.kernels.conv3d import Epilogue, Partials, conv3d, pack_weight


def clip(frames, h, w, c):
    """Bordered frames behind two copies of the first one."""
    x = torch.zeros(frames + 2, h + 2, w + 2, c)
    x[2:, 1:-1, 1:-1] = torch.randn(frames, h, w, c)
    x[:2] = x[2]
    return x


def run(x, weight, out, residual, bias, start, first):
    """As the fused networks call it."""
    parts = []
    for piece, a, b, later in weight.pieces(first, out.shape[0]):
        slot = (start + a + later) % x.shape[0]
        parts.append(conv3d(x, piece, out[a:b], epilogue=Epilogue(bias, residual[a:b], 4), start=slot))
    return Partials.concat(parts, 0)


@pytest.mark.parametrize("chunks", [(4,), (1, 3), (1, 1, 2), (2, 2), (3, 1)])
def test_every_chunking_equals_all_taps(chunks):
    torch.manual_seed(0)
    x = clip(4, 5, 7, 8)
    kernel = torch.randn(16, 8, 3, 3, 3)
    bias, residual = torch.randn(16), torch.randn(4, 5, 7, 16)
    plain, early = pack_weight(kernel, torch.float32), pack_weight(kernel, torch.float32, early=True)
    want, got = torch.empty(2, 4, 5, 7, 16)
    whole = conv3d(x, plain, want, epilogue=Epilogue(bias, residual, 4))
    ring = torch.roll(x, 3, 0)  # the clip starts at slot 3 of 6
    at, sums = 0, []
    for n in chunks:
        sums.append(run(ring, early, got[at : at + n], residual[at : at + n], bias, (3 + at) % 6, at))
        at += n
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
    torch.testing.assert_close(Partials.concat(sums, 0).data, whole.data, rtol=1e-4, atol=1e-3)


def test_pieces():
    early = pack_weight(torch.randn(8, 8, 3, 3, 3), torch.float32, early=True)
    one, two = early.early
    assert (one.kernel, two.kernel) == ((1, 3, 3), (2, 3, 3))
    assert list(early.pieces(0, 4)) == [(one, 0, 1, 2), (two, 1, 2, 1), (early, 2, 4, 0)]
    assert list(early.pieces(1, 1)) == [(two, 0, 1, 1)]
    assert list(early.pieces(2, 3)) == [(early, 0, 3, 0)]
    plain = pack_weight(torch.randn(8, 8, 3, 3, 3), torch.float32)
    assert list(plain.pieces(0, 2)) == [(plain, 0, 2, 0)]
