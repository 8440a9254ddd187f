"""Cases of `compile_cases.py` for transformers and Mage-VAE's blocks, at published sizes, as meta tensors."""

from __future__ import annotations

import itertools

import cross_compile
import torch
from zerowaste_vae.engine.families.ltx_diffusion.kernels import blocks
from zerowaste_vae.engine.families.ltx_diffusion.kernels.neighbourhood import Window, neighbourhood
from zerowaste_vae.engine.families.mage.kernels import mixing
from zerowaste_vae.engine.families.mage.kernels.patch_pixels import PatchNetwork, patch_pixels
from zerowaste_vae.engine.kernels import tokens
from zerowaste_vae.engine.kernels.targets import FP8, Target, using
from zerowaste_vae.engine.kernels.to_pixels import BYTES, UNIT

HALF, BF16, INT8 = torch.float16, torch.bfloat16, torch.int8


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def token_calls(stored: torch.dtype, wide: torch.dtype):
    """Call the kernels at the published transformer's width, into `stored`, from products in `wide`."""
    rows, width = 1797, 2048
    scales = meta(rows) if stored.itemsize == 1 else None
    x, y, vector = meta(rows, width, dtype=HALF), meta(rows, width, dtype=wide), meta(width, dtype=HALF)
    narrow, gate = meta(rows, width, dtype=stored), meta(rows, 4 * width, dtype=stored)
    with cross_compile.recorded() as calls:
        tokens.normalised(x, vector, 1e-5, narrow, scales)
        tokens.normalised(x, vector, 1e-5, narrow, scales, y=y, scale=vector)
        tokens.rotated(meta(rows, 3 * width, dtype=wide), meta(rows, 2, 24), 64, 1e-5)
        tokens.rounded(y, narrow, scales)
        tokens.gated(meta(rows, 8 * width, dtype=wide), gate, scales)
        tokens.summed(meta(rows, width, dtype=torch.int32), meta(rows), meta(width), vector, y)
        if stored == INT8:
            tokens.normalised(x, vector, 1e-5, narrow, scales, turn=256)
            tokens.rounded(y, narrow, scales, turn=256, zeroed=True)
            tokens.rounded(meta(rows, 4 * width, dtype=wide), gate, scales, turn=256)
            sums, columns = meta(rows, 8 * width, dtype=torch.int32), meta(8 * width)
            tokens.summed(sums, meta(rows), columns, meta(8 * width, dtype=HALF), meta(rows, 4 * width), pairs=True)
    return calls


def product_calls(here: Target):
    """Call int8 products, where there is a kernel for them: queries, keys and values, and the gate."""
    rows, k = 12579, 2048
    with cross_compile.recorded("tokens.product_kernel") as calls, using(here):
        for n, pairs in ((6144, False), (16384, True)):
            x, weight, sums = meta(rows, k, dtype=INT8), meta(n, k, dtype=INT8), meta(rows * n, dtype=torch.int32)
            out = meta(rows, n // (1 + pairs), dtype=HALF)
            tokens.multiplied(x, weight, meta(rows), meta(n), meta(n, dtype=HALF), out, sums, pairs=pairs)
        x, weight, scale = meta(rows, 8192, dtype=INT8), meta(k, 8192, dtype=INT8), meta(k, dtype=HALF)
        sums, out = meta(rows * k, dtype=torch.int32), meta(rows, k, dtype=HALF)
        tokens.multiplied(x, weight, meta(rows), meta(k), scale, out, sums, scale=scale)
    return calls


def attended_calls(here: Target):
    """Call attention of seven tiles, where there is a kernel for it."""
    qkv = meta(12579, 6144, dtype=HALF)
    with cross_compile.recorded() as calls, using(here):
        if tokens.attends(qkv, 64):
            tokens.attended(qkv, 1797, 64, meta(12579, 2048, dtype=HALF))
    return calls


def mixing_calls():
    """Call the passes of Mage-VAE's blocks, at the published widths of both halves, and its last stage."""
    width, vector = 384, meta(384)
    with cross_compile.recorded() as calls:
        for c, rows in ((width, meta(4096, 2 * width, dtype=BF16)[:, width:]), (768, meta(4096, 768, dtype=BF16))):
            flat = meta(4096, c, dtype=BF16)
            mixing.layer_normed(rows, meta(c), meta(c), 1e-6, flat)
            mixing.layer_normed(rows, meta(c), meta(c), 1e-6, flat, more=(flat, meta(c)))
            mixing.gates(meta(c), 4096, meta(c, c), meta(c), meta(c, c), meta(c, c, dtype=BF16))
            mixing.mixed(meta(64, 64, c, dtype=BF16), meta(9, c), meta(c), meta(64, 64, c, dtype=BF16), meta(128, c))
        mixing.layer_normed(meta(4096, width, dtype=BF16), vector, vector, 1e-6, meta(4096, width))
        picture, flat = meta(64, 64, width, dtype=BF16), meta(4096, width, dtype=BF16)
        mixing.windowed(picture, 32, flat)
        mixing.unwindowed(flat, 32, picture)
    return calls


def pixel_network_calls(here: Target):
    """Call the last stage of Mage-VAE into floats and bytes."""
    stream, bias = meta(256, 32, 384, dtype=BF16), meta(256, 32)
    weights = PatchNetwork(
        stream, bias, stream, bias, meta(3, 5, 32, 32, dtype=BF16), meta(3, 7, 32), meta(3, 32), meta(3), 32
    )
    with cross_compile.recorded() as calls, using(here):
        for pixels, kind in ((UNIT, torch.float32), (BYTES, torch.uint8)):
            x, out = meta(1, 64, 64, 768, dtype=BF16), meta(1, 1024, 1024, 3, dtype=kind)
            patch_pixels(x, weights, 1e-6, out, pixels=pixels, health=meta(1))
    return calls


def wide_calls(here: Target):
    """Call the kernels that work beside the matrix units, at LTX-2.5's widths."""
    q, keys = meta(2, 176, 320, 4, 64, dtype=BF16), meta(12, 176, 320, 2, 4, 64, dtype=BF16)
    weight, biases, rows = meta(2048, 256, dtype=BF16), meta(2048, dtype=BF16), meta(112640, 256, dtype=BF16)
    qkv, of_heads = meta(768, 256, dtype=BF16), (meta(768, dtype=BF16), meta(2, 64), meta(512, 32, 2))
    names = "blocks.wide_gated_kernel", "blocks.wide_projected_kernel", "neighbourhood.wide_neighbourhood_kernel"
    with cross_compile.recorded(*names, "blocks.feed_kernel") as calls:
        window = Window((11, 11, 11), 20, 1 << 30)
        neighbourhood.launch(here, q, keys[..., 0, :, :], keys[..., 1, :, :], window, out=q)
        with using(here):
            blocks.gated_product(rows, weight, biases, 1e-6, meta(112640, 1024, dtype=BF16), backend="triton")
            for kind, out in itertools.product((BF16, INT8, FP8), ("queries", "keys")):
                columns = None if kind == BF16 else meta(768)
                both = (meta(112640, 4, 64, dtype=BF16), None) if out == "queries" else (None, keys.view(-1, 2, 4, 64))
                place = blocks.Place(0, 176, 320)
                blocks.projected(rows, qkv.to(kind), *of_heads, place, 1e-6, *both, backend="triton", columns=columns)
            down, more = meta(256, 1024, dtype=BF16), (rows, meta(256, 256, dtype=BF16), meta(256, dtype=BF16))
            blocks.feed_forward(rows, weight, biases, 1e-6, down, more, more, backend="triton")
    return calls


def narrow_calls(here: Target, kind: torch.dtype):
    """Call the 8-bit products of LTX-2.5's last blocks, at the published widths."""
    rows, width, inner = 112640, 256, 1024
    x, bias, keys = meta(rows, width, dtype=BF16), meta(2 * inner, dtype=BF16), meta(rows, 2, 4, 64, dtype=BF16)
    codes, scales = meta(rows, inner, dtype=kind), meta(rows, inner // blocks.GROUP)
    with cross_compile.recorded() as calls, using(here):
        weight, place = meta(3 * width, width, dtype=kind), blocks.Place(0, 176, 320)
        blocks.projected(x, weight, bias, meta(2, 64), meta(512, 32, 2), place, 1e-6, None, keys, columns=meta(768))
        weight = meta(2 * inner, width, dtype=kind)
        blocks.gated_product(x, weight, bias, 1e-6, codes, columns=meta(2 * inner), scales=scales)
        more, down = (x, meta(width, width, dtype=BF16)), meta(width, inner, dtype=kind)
        blocks.added(x, codes, down, bias, more, columns=meta(width), scales=scales)
    return calls


def transformer_cases(here: Target):
    """Yield (name, recorded call) for one generation."""
    if here.wgmma:
        heads = [f"blocks {kind}of {what}" for kind in ("", "int8 ", "fp8 ") for what in ("queries", "keys")]
        names = "neighbourhood", "blocks", *heads, "blocks of an MLP"
        for name, call in zip(names, wide_calls(here), strict=True):
            yield f"{name} wide", call
    kinds = [(HALF, HALF), (INT8, HALF), *([(FP8, BF16)] if here.fp8 else [])]
    for kind, wide in kinds:
        for i, call in enumerate(token_calls(kind, wide)):
            yield f"tokens {str(kind).split('.')[1]} {i}", call
    for i, call in enumerate(product_calls(here)):
        yield f"conv int8 product of tokens {i}", call
    for call in attended_calls(here):
        yield "attention of tokens", call
    for kind in (INT8, FP8) if here.fp8 else (INT8,):
        for i, call in enumerate(narrow_calls(here, kind)):
            yield f"blocks {str(kind).split('.')[1]} {i}", call
    for i, call in enumerate(mixing_calls()):
        yield f"mixing {i}", call
    for i, call in enumerate(pixel_network_calls(here)):
        yield f"patch_pixels {i}", call
