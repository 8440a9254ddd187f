"""Settings are ours inside and the host's again outside, also after an error."""

import pytest
import torch
from zerowaste_vae.engine.kernels.precision import exact_math, tf32_asked
from zerowaste_vae.engine.planning.dryrun import peak_bytes
from zerowaste_vae.engine.runtime import scope
from zerowaste_vae.engine.runtime.scope import attention_scope, scoped_math

CUDA = torch.device("cuda")
product, cudnn, cuda = torch.backends.cuda.matmul, torch.backends.cudnn, torch.backends.cuda


def settings():
    """Everything a scope may touch; readable without a GPU."""
    new = hasattr(product, "fp32_precision")
    return {
        "products": product.fp32_precision if new else product.allow_tf32,
        "convolutions": cudnn.conv.fp32_precision if new else cudnn.allow_tf32,
        "benchmark": cudnn.benchmark,
        "fp16 sums": getattr(product, "allow_fp16_accumulation", None),
        "flash": cuda.flash_sdp_enabled(),
        "efficient": cuda.mem_efficient_sdp_enabled(),
        "grad": torch.is_grad_enabled(),
    }


@pytest.fixture
def strange_host():
    """A host that has set everything the other way round."""
    before = settings()
    cudnn.benchmark = True
    cuda.enable_flash_sdp(False)
    cuda.enable_mem_efficient_sdp(False)
    if before["fp16 sums"] is not None:
        product.allow_fp16_accumulation = True
    yield settings()
    cudnn.benchmark = before["benchmark"]
    cuda.enable_flash_sdp(before["flash"])
    cuda.enable_mem_efficient_sdp(before["efficient"])
    if before["fp16 sums"] is not None:
        product.allow_fp16_accumulation = before["fp16 sums"]


@pytest.mark.parametrize("tf32", [False, True])
def test_ours_inside_the_hosts_outside(strange_host, tf32):
    with pytest.raises(KeyError), scoped_math(CUDA, tf32=tf32, cudnn_benchmark=False):
        inside = settings()
        assert inside["benchmark"] is False and not inside["fp16 sums"] and not inside["grad"]
        assert inside["flash"] and inside["efficient"]
        assert inside["products"] in (("tf32", True) if tf32 else ("ieee", False))
        assert inside["products"] == inside["convolutions"]
        assert tf32_asked() is tf32
        with exact_math(CUDA):  # what composing weights and plain attention do inside a run
            assert settings()["products"] in ("ieee", False) and not tf32_asked()
        raise KeyError
    assert settings() == strange_host and not tf32_asked()


def test_benchmark_is_switched_on_and_back():
    before = cudnn.benchmark
    with scoped_math(CUDA, cudnn_benchmark=True):
        assert cudnn.benchmark is True
    assert cudnn.benchmark is before


def test_a_cpu_run_touches_nothing_but_gradients(strange_host):
    with scoped_math(torch.device("cpu"), tf32=True, cudnn_benchmark=True):
        assert settings() == {**strange_host, "grad": False}


def test_plain_attention(noise, monkeypatch):
    """Plain attention replaces torchs and equals it."""
    q, k, v = (noise(2, 1, 700, 24, seed=s) for s in range(3))
    attend = torch.nn.functional.scaled_dot_product_attention
    expected, calls = attend(q, k, v), []
    real = scope.attention.reference
    monkeypatch.setattr(scope.attention, "reference", lambda *a: calls.append(1) or real(*a))
    with attention_scope(False):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    assert calls == [1]
    with attention_scope(True):
        assert torch.equal(torch.nn.functional.scaled_dot_product_attention(q, k, v), expected)
    assert calls == [1]


def test_attention_in_dry_runs():
    """Dry runs see the scores of plain attention."""
    n, c = 4096, 64
    q = torch.empty(1, 1, n, c, device="meta")

    def program(flash):
        def run():
            with attention_scope(flash):
                torch.nn.functional.scaled_dot_product_attention(q, q, q)

        return run

    lean, plain = peak_bytes(program(True)), peak_bytes(program(False))
    assert lean == n * c * 4
    scores = 512 * n * 4
    assert lean + 2 * scores <= plain < n * n * 4


@pytest.mark.parametrize("kind", [torch.float16, torch.float64])
def test_no_type_of_the_caller(kind):
    """Tensors made without a type, and products, are as without the caller's settings, which stay."""
    torch.set_default_dtype(kind)
    try:
        with torch.autocast("cpu", torch.bfloat16), scoped_math(torch.device("cpu")):
            assert torch.ones(1).dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
        assert torch.get_default_dtype() == kind
        with torch.autocast("cpu", torch.bfloat16):
            with scoped_math(torch.device("cpu")):
                pass
            assert torch.is_autocast_enabled("cpu")
    finally:
        torch.set_default_dtype(torch.float32)


def test_products_of_medium_precision(noise):
    """They are bf16 on a CPU that has such products; not in our runs."""
    x, w = noise(64, 256), noise(256, 64)
    conv, images = torch.nn.Conv2d(32, 32, 3), noise(1, 32, 16, 16)
    expected = x @ w, conv(images)
    torch.set_float32_matmul_precision("medium")
    try:
        before = x @ w
        with scoped_math(torch.device("cpu")):
            assert torch.equal(x @ w, expected[0]) and torch.equal(conv(images), expected[1])
        assert torch.get_float32_matmul_precision() == "medium" and torch.equal(x @ w, before)
    finally:
        torch.set_float32_matmul_precision("highest")
