import sys
from pathlib import Path

import pytest
import torch
from zerowaste_vae.engine.kernels.attention import attention, schedules

sys.path.insert(0, str(Path(__file__).parent))
from helpers import TOLERANCE, error


def exact(q, k, v):
    q, k, v = q.double(), k.double(), v.double()
    return (q @ k.transpose(1, 2) * q.shape[-1] ** -0.5).softmax(-1) @ v


@pytest.mark.parametrize("head", [64, 384, 512, 1024])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_kernel_and_reference(interpreter, head, dtype):
    q, k, v = (torch.randn(2, 77, head).to(dtype) for _ in range(3))
    q = q * 3  # a peaked softmax: rescaling of the running sums matters
    want = exact(q, k, v)
    assert error(attention(q, k, v, backend="reference"), want) < TOLERANCE[dtype]
    got = attention(q, k, v, backend="triton")
    assert error(got, want) < TOLERANCE[dtype] * 2  # weights are rounded to the operand type as well
    assert torch.equal(attention(q[1:], k[1:], v[1:], backend="triton"), got[1:])


def test_blocks_of_queries_give_the_bits_of_one(interpreter, monkeypatch):
    q, k, v = (torch.randn(1, 300, 264).half() for _ in range(3))
    whole = attention(q, k, v, backend="triton")
    assert schedules.block_rows(300, 1, 128) == 384
    monkeypatch.setattr(schedules, "SCRATCH_BYTES", 1)
    assert schedules.block_rows(300, 1, 128) == 128
    assert torch.equal(attention(q, k, v, backend="triton"), whole)


def test_torch_path_and_blocks_of_queries():
    q, k, v = (torch.randn(1, 700, 24) for _ in range(3))
    want = exact(q, k, v)
    assert error(attention(q, k, v), want) < 1e-5
    assert error(attention(q, k, v, backend="reference"), want) < 1e-5


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="attention needs"):
        attention(torch.randn(1, 4, 8), torch.randn(1, 5, 8), torch.randn(1, 4, 8))
