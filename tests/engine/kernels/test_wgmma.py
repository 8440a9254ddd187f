"""The kernels that work beside the matrix units: which cards run them."""

import pytest
import torch
from zerowaste_vae.engine.families.ltx_diffusion.kernels.blocks import (
    Place,
    feed_forward,
    feeds,
    gated_product,
    projected,
)
from zerowaste_vae.engine.families.ltx_diffusion.kernels.neighbourhood import Window, neighbourhood
from zerowaste_vae.engine.kernels.cards import FORMS
from zerowaste_vae.engine.kernels.launching import recording
from zerowaste_vae.engine.kernels.targets import capabilities, prebuilt, using

HOPPER = capabilities("card", 90, (3, 6))


def meta(*shape):
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def product(here):
    with recording(here) as calls:
        gated_product(meta(300, 256), meta(2048, 256), meta(2048), 1e-6, meta(300, 1024), backend="triton")
    return calls


def heads(here, queries=True, keys=True, width=256, kind=torch.bfloat16):
    rows, table = meta(300, width), meta(512, 32, 2)
    query, both = meta(300, width // 64, 64), meta(300, 2, width // 64, 64)
    with recording(here) as calls:
        projected(rows, meta(3 * width, width).to(kind), meta(3 * width), meta(2, 64), table, Place(0, 15, 20), 1e-6,
                  query if queries else None, both if keys else None, backend="triton",
                  columns=None if kind == torch.bfloat16 else meta(3 * width))  # fmt: skip
    return [one.kernel for one in calls]


def attention(here, head=64):
    q, keys = meta(2, 30, 40, 4, head), meta(12, 30, 40, 2, 4, head)
    with recording(here) as calls:
        neighbourhood.launch(here, q, keys[..., 0, :, :], keys[..., 1, :, :], Window((11, 11, 11), 20, 1 << 30), out=q)
    return calls


def mlp(here):
    rows, product = meta(300, 256), (meta(300, 256), meta(256, 256), meta(256))
    with recording(here) as calls:
        feed_forward(rows, meta(2048, 256), meta(2048), 1e-6, meta(256, 1024), None, product, backend="triton")
    return calls


CARDS = pytest.mark.parametrize("here, wide", [
    (HOPPER, True), (capabilities("card", 90, (3, 7)), True), (capabilities("card", 90, (3, 5)), False),
    *[(capabilities("card", sm, (3, 6)), False) for sm in (80, 89, 100, 120)],
    *[(prebuilt("card", FORMS[name], name), False) for name in "AC"],
], ids=str)  # fmt: skip


@CARDS
def test_mlp(here, wide):
    """One kernel runs the MLP of 256 channels where there is wgmma, with as many programs as processors or tiles."""
    with using(here):
        found = [feeds(*size, torch.device("meta")) for size in ((256, 1024), (128, 512), (256, 1000))]
    assert found == [wide, False, False]
    if wide:
        assert [(one.kernel, one.grid) for one in mlp(here)] == [("blocks.feed_kernel", (3,))]


@CARDS
def test_cards(here, wide):
    assert [one.kernel for one in product(here)] == [f"blocks.{'wide_' * wide}gated_kernel"]
    for which in ({"keys": False}, {"queries": False}):
        assert heads(here, **which) == [f"blocks.{'wide_' * wide}projected_kernel"]
        eight = "wide_" if wide else "narrow_"
        assert heads(here, **which, kind=torch.int8) == [f"blocks.{eight}projected_kernel"]
    assert heads(here) == heads(here, keys=False, width=64) == ["blocks.projected_kernel"]  # both; one head
    found = {one.kernel for one in attention(here)}
    assert ("neighbourhood.wide_neighbourhood_kernel" in found) == wide
    assert "neighbourhood.neighbourhood_kernel" in found  # for small frames, and where no bound is known
    assert {one.kernel for one in attention(here, 32)} == {"neighbourhood.neighbourhood_kernel"}
