"""A clip's first two frames through weights with fewer taps in time."""

import pytest
import torch
from zerowaste_vae.engine.kernels.conv3d import Epilogue, conv3d, pack_weight


def clip(frames, h, w, c):
    """Bordered frames behind two copies of the first one."""
    x = torch.zeros(frames + 2, h + 2, w + 2, c)
    x[2:, 1:-1, 1:-1] = torch.randn(frames, h, w, c)
    x[:2] = x[2]
    return x


@pytest.mark.parametrize("chunks", [(4,), (1, 3), (1, 1, 2), (2, 2), (3, 1)])
def test_every_chunking_equals_all_taps(chunks):
    torch.manual_seed(0)
    x = clip(4, 5, 7, 8)
    kernel = torch.randn(16, 8, 3, 3, 3)
    bias, residual = torch.randn(16), torch.randn(4, 5, 7, 16)
    plain, early = pack_weight(kernel, torch.float32), pack_weight(kernel, torch.float32, early=True)
    assert [w.kernel for w in early.early] == [(1, 3, 3), (2, 3, 3)]
    want, got = torch.empty(2, 4, 5, 7, 16)
    whole = conv3d(x, plain, want, epilogue=Epilogue(bias, residual, 4))
    ring = torch.roll(x, 3, 0)  # the clip starts at slot 3 of 6
    at, sums = 0, []
    for n in chunks:
        epilogue = Epilogue(bias, residual[at : at + n], 4)
        sums.append(conv3d(ring, early, got[at : at + n], epilogue=epilogue, start=(3 + at) % 6, first=at).data)
        at += n
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
    torch.testing.assert_close(torch.cat(sums), whole.data, rtol=1e-4, atol=1e-3)


def test_later_frames_take_all_taps():
    x = clip(2, 3, 3, 8)
    x[0] = 7.0
    weight = pack_weight(torch.randn(8, 8, 3, 3, 3), torch.float32, early=True)
    a, b, first = torch.empty(3, 1, 3, 3, 8)
    conv3d(x, weight, a)
    conv3d(x, weight, b, first=5)
    conv3d(x, weight, first, first=0)
    assert torch.equal(a, b) and not torch.equal(a, first)
