"""Keys name what Triton would compile anew for, and nothing else."""

from dataclasses import dataclass

import pytest
import torch
from zerowaste_vae.engine.kernels.prebuilt.keys import key, takes


@dataclass
class Descriptor:
    base: torch.Tensor
    block_shape: list


def made(args, **constants):
    return key("conv3d.conv_kernel", args, {"C": 128, "num_warps": 4, **constants})


X = torch.empty(8, 4, dtype=torch.float16, device="meta")


@pytest.mark.parametrize(
    "other",
    [
        made([X, 3, 1.0], UNIT=1), made([X.float(), 3, 1.0]), made([X, 2**31, 1.0]), made([X, 3, 1]),
        made([Descriptor(X, [128, 64]), 3, 1.0]), key("norm_act.norm_act_kernel", [X, 3, 1.0], {"C": 128}),
    ],
)  # fmt: skip
def test_what_is_compiled_anew_has_another_key(other):
    mine = made([X, 3, 1.0])
    assert mine != other and mine.digest != other.digest


def test_values_and_the_order_of_constants_make_no_difference():
    a = key("conv3d.conv_kernel", [X, 1, 1.0], {"SCALED": True, "C": 128})
    b = key("conv3d.conv_kernel", [X[3:], 16, 0.5], {"C": 128, "SCALED": 1})
    assert a == b and a.digest == b.digest


def test_blocks_of_descriptors_are_part_of_the_key():
    one, two = (made([Descriptor(X, [n, 64])]) for n in (64, 128))
    assert one.digest != two.digest and one.types == ("map:fp16[64,64]",)


def test_what_an_entry_takes():
    found = takes(made([Descriptor(X, [128, 64]), X, 3, 2.0, 2**40]))
    assert found == ("map", "i32", "i32", "i64", "i64", "pointer", "i32", "fp32", "i64", "scratch", "scratch")


def test_digests_stay_what_files_have():
    assert key("probe.doubling_kernel", [X, X], {"N": 128, "num_warps": 4}).digest == "a6bb3b1c842375e3"
