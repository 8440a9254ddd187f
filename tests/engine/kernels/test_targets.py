import subprocess
import sys

import pytest
import torch
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
