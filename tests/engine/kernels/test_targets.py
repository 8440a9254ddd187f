import subprocess
import sys

import pytest
import torch
from zerowaste_vae.engine.kernels.buffers import HaloBuffer
from zerowaste_vae.engine.kernels.targets import FP8, capabilities, target, use_triton


@pytest.mark.parametrize("sm, triton, dtype, fast, expected", [
    (90, (3, 6), FP8, False, "f32"), (90, (3, 6), torch.float16, True, "f32"), (90, (3, 6), torch.int8, False, "i32"),
    (120, (3, 6), FP8, False, "mx"), (120, (3, 5), FP8, False, "f32"), (120, (3, 5), FP8, True, "f16"),
    (120, (3, 6), torch.float16, True, "f16"), (89, (3, 6), FP8, True, "f16"), (89, (3, 6), FP8, False, "f32"),
    (80, (3, 6), torch.float16, True, "f32"), (86, (3, 6), torch.float16, True, "f16"),
])  # fmt: skip
def test_accumulation(sm, triton, dtype, fast, expected):
    assert capabilities("a GPU", sm, triton).accumulate(dtype, fast) == expected


@pytest.mark.parametrize("sm, triton, fp8, word", [
    (120, None, False, "not installed"), (90, (3, 4), False, "older than 3.5"), (75, (3, 6), False, "older than sm_80"),
    (86, (3, 6), False, "no fp8"), (89, (3, 6), True, "bulk tensor"), (120, (3, 5), True, "Triton 3.6"),
])  # fmt: skip
def test_what_is_off_is_explained(sm, triton, fp8, word):
    here = capabilities("a GPU", sm, triton)
    assert any(word in note for note in here.notes)
    assert here.supports(FP8) == fp8
    assert not here.supports(torch.float32)


def test_cpu_runs_the_reference_unless_asked():
    assert not use_triton(torch.device("cpu"), "auto")
    assert not target("cpu").kernels and target("cpu").notes
    with pytest.raises(ValueError, match="backend"):
        use_triton(torch.device("cpu"), "fast")


def test_importing_the_operators_imports_no_triton():
    code = ("import sys; import zerowaste_vae.engine.kernels.conv3d, zerowaste_vae.engine.kernels.norm_act, "
            "zerowaste_vae.engine.kernels.upsample, zerowaste_vae.engine.kernels.attention, "
            "zerowaste_vae.engine.kernels.to_pixels; sys.exit('triton' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_halo_buffer_is_a_ring():
    buffer = HaloBuffer.empty(3, (4, 5), 16, torch.float16, "cpu")
    assert buffer.data.shape == (5, 6, 7, 16)
    buffer.data.fill_(9)
    buffer.clear_border()
    for chunk in range(4):
        for f in range(3):
            buffer.data[buffer.slot(f), 1:-1, 1:-1] = chunk * 3 + f
        if chunk == 0:
            buffer.begin()
        history = [buffer.data[buffer.slot(f), 2, 2, 0].item() for f in range(-2, 3)]
        assert history == [max(chunk * 3 + f, 0) for f in range(-2, 3)]
        buffer.advance(3)
    buffer.rewind()
    assert buffer.start == 0 and [buffer.data[buffer.slot(f), 2, 2, 0].item() for f in (-2, -1)] == [10, 11]
    assert buffer.inside(0, 3, 16).shape == (3, 4, 5, 16) and not buffer.data[:, 0].any()
    buffer.advance(2)
    with pytest.raises(ValueError, match="wrap"):
        buffer.inside(0, 3, 16)
    buffer.begin_zero()
    assert not buffer.data[buffer.slot(-1)].any()
