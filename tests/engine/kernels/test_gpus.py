"""GPUs are found by the names that people write, and their figures agree with what is published of them."""

import pytest
from zerowaste_vae.engine.errors import InputError
from zerowaste_vae.engine.kernels.cards import CARDS
from zerowaste_vae.engine.kernels.gpus import GPUS, find


@pytest.mark.parametrize(("text", "name", "memory"), [
    ("5070ti", "RTX 5070 Ti", (16,)), ("rtx5070 ti", "RTX 5070 Ti", (16,)), ("RTX 5070 Ti", "RTX 5070 Ti", (16,)),
    ("NVIDIA GeForce RTX 5070 Ti", "RTX 5070 Ti", (16,)), ("rtx-5070-ti", "RTX 5070 Ti", (16,)),
    ("RTX 5070", "RTX 5070", (12,)), ("RTX 5060 Ti", "RTX 5060 Ti", (8, 16)), ("5060ti 16gb", "RTX 5060 Ti", (16,)),
    ("RTX 3080", "RTX 3080", (10,)), ("RTX 3080 12GB", "RTX 3080 12 GB", (12,)), ("3080 10 GB", "RTX 3080", (10,)),
    ("4070 TI SUPER", "RTX 4070 Ti Super", (16,)), ("RTX PRO 6000", "RTX PRO 6000", (96,)),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000", (96,)), ("pro6000", "RTX PRO 6000", (96,)),
    ("MSI GeForce RTX 5070 Ti Gaming Trio 16G", "RTX 5070 Ti", (16,)), ("4060ti16gb", "RTX 4060 Ti", (16,)),
    ("GeForce RTX5090", "RTX 5090", (32,)), ("ASUS TUF RTX 4070 Ti SUPER OC", "RTX 4070 Ti Super", (16,)),
    ("rtx_3090", "RTX 3090", (24,)), ("NVIDIA A100-SXM4-80GB", "A100 80 GB", (80,)), ("nvidia l40s", "L40S", (48,)),
    ("NVIDIA H100 80GB HBM3", "H100", (80,)), ("NVIDIA H200", "H200", (141,)), ("DGX Spark", "GB10", (128,)),
])  # fmt: skip
def test_names(text, name, memory):
    found = find(text, "--card")
    assert (found.name, found.gpu.name, found.gpu.memory, found.why) == (name, name, memory, "")


@pytest.mark.parametrize(("text", "sm", "why"), [
    ("RTX 4090 Laptop GPU", 89, "laptop"), ("5090 mobile", 120, "laptop"), ("RTX 3070 Max-Q", 86, "laptop"),
    ("RTX PRO 5000", 120, "not kept"), ("RTX A4000", 86, "not kept"), ("RTX 5000 Ada", 89, "not kept"),
    ("RTX 5090 Laptop GPU 24 GB", 120, "laptop"), ("NVIDIA GeForce RTX 4060 Laptop GPU", 89, "laptop"),
    ("RTX PRO 4000 Blackwell", 120, "not kept"), ("RTX PRO 2000 Blackwell Laptop GPU", 120, "laptop"),
    ("RTX 4090 D", 89, "not kept"), ("RTX 2080 Ti", 75, "not kept"), ("GTX 1080", 61, "not kept"),
    ("Tesla T4", 75, "not kept"), ("V100", 70, "not kept"), ("B200", 100, "not kept"), ("A10G", 86, "not kept"),
    ("RTX 6000 Ada Generation", 89, "not kept"), ("NVIDIA RTX A6000", 86, "not kept"), ("L20", 89, "not kept"),
    ("RTX 5060", 120, "not kept"), ("sm_89", 89, ""), ("8.9", 89, ""), ("A100", 80, "not kept"),
    ("RTX 5070 Ti 24 GB", 120, "RTX 5070 Ti is known here with 16 GB"), ("rtx 4060 ti 12gb", 89, "with 8 or 16 GB"),
])  # fmt: skip
def test_cards_without_figures_have_a_generation_and_a_reason(text, sm, why):
    found = find(text, "--card")
    assert (found.name.replace("sm_89", "8.9"), found.sm, found.gpu) == (text.replace("sm_89", "8.9"), sm, None)
    assert why in found.why and bool(why) == bool(found.why)


@pytest.mark.parametrize("text", ["", "Voodoo 2", "RTX", "RX 7900 XTX", "laptop", "16 GB"])
def test_others_are_refused(text):
    with pytest.raises(InputError, match=r"--card .* names no GPU that is known here"):
        find(text, "--card")


#: Published dense TFLOP/s with sums in fp32 and in fp16, and int8 TOP/s.
PUBLISHED = {
    "RTX 3090 Ti": (80, 160, 320), "RTX 4090": (165.2, 330.3, 660.6), "RTX 4080": (97.5, 195, 390),
    "RTX 5070 Ti": (87.9, 176, 352), "RTX 5080": (113, 225, 450), "RTX 5090": (209.5, 419, 838),
    "RTX PRO 6000": (504, 504, 1008), "L40S": (366, 366, 733), "A100 80 GB": (312, 312, 624),
}  # fmt: skip


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_products_are_those_published(name):
    gpu = find(name, "--card").gpu
    assert [gpu.tflops(kind) for kind in ("f32", "f16", "s32")] == pytest.approx(PUBLISHED[name], rel=0.01)


def test_rows_are_complete():
    assert len({gpu.name for gpu in GPUS}) == len(GPUS)
    for gpu in GPUS:
        assert gpu.sm in CARDS and gpu.source and gpu.memory
        assert 0.75 < gpu.real / gpu.mhz < 1.25
        assert find(gpu.name, "--card").gpu == gpu
