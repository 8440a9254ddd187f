import os

import pytest
import torch
from zerowaste_vae.engine.errors import InputError
from zerowaste_vae.engine.extras.bench import form
from zerowaste_vae.engine.kernels.targets import capabilities, target

CUDA = torch.device("cuda", 0)
H200 = (9, 0)


@pytest.fixture
def gpu(monkeypatch):
    """A Hopper GPU with Triton, as far as anything here asks."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: H200)
    monkeypatch.setattr(form, "triton_version", lambda: (3, 6))
    monkeypatch.setattr(form, "target", lambda _: capabilities("NVIDIA H200", 90, (3, 6)))
    return monkeypatch


def test_generations(gpu):
    """A generation has its cards' abilities, except block-scaled products."""
    ada, blackwell = form.checked("sm_89", CUDA), form.checked("sm_120", CUDA)
    assert (ada.sm, ada.tma, ada.shared_kib, ada.half_accumulate) == (89, False, 99, True)
    assert (blackwell.sm, blackwell.tma, blackwell.mxfp8) == (120, True, False)
    assert ada.name == "NVIDIA H200 as sm_89"


def test_form_refused(gpu):
    """A form that cannot run here is refused in one line."""
    with pytest.raises(InputError, match="--as sm_89: needs a CUDA GPU, not cpu"):
        form.checked("sm_89", torch.device("cpu"))
    gpu.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 6))
    with pytest.raises(InputError, match=r"--as sm_120: .* \(sm_86\); it needs sm_90 or later"):
        form.checked("sm_120", CUDA)
    gpu.setattr(form, "triton_version", lambda: None)
    with pytest.raises(InputError, match="--as sm_80: Triton is not installed"):
        form.checked("sm_80", CUDA)


@pytest.mark.parametrize("shared, warps, blocks", [(98320, 8, 1), (65552, 4, 1), (49184, 4, 2), (32784, 4, 3),
                                                   (24592, 4, 3), (1024, 4, 12), (0, 8, 6)])  # fmt: skip
def test_padding(shared, warps, blocks):
    """No more blocks share a processor than 100 KiB and 48 warps hold."""
    held = form.padded(shared, warps)
    assert held >= shared
    assert (227 << 10) // (held + 1024) == blocks and blocks * warps <= 48


def test_form_is_undone(gpu):
    """Leaving a form restores everything."""
    pytest.importorskip("triton")
    from triton.compiler.compiler import CompiledKernel

    before = CompiledKernel.__init__
    gpu.delenv("TRITON_OVERRIDE_ARCH", raising=False)
    with pytest.raises(RuntimeError, match="inside"), form.in_form("sm_89", CUDA) as here:
        assert os.environ["TRITON_OVERRIDE_ARCH"] == "sm89" and CompiledKernel.__init__ is not before
        assert target(CUDA) is here and target("cuda") is here
        raise RuntimeError("inside")
    assert "TRITON_OVERRIDE_ARCH" not in os.environ and CompiledKernel.__init__ is before
