"""Checks of the passes over tokens, of attention and of int8 products, for check_kernels_gpu.py."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from conv_checks import DEVICE, TOLERANCE, Row, error
from zerowaste_vae.engine.kernels.tokens import attended, attends, multiplied, normalised, rotated, rounded, sum_rows

HALF, INT8 = torch.float16, torch.int8
#: Rows and columns of int8 passes: one block, and one that a row does not fill.
ROWS = ((130, 2048), (77, 768), (9, 8192))
#: Tiles, tokens of each, and heads of 64.
TILES = ((3, 1797, 32), (2, 64, 4), (5, 69, 3))
#: Rows, outputs and columns of products.
PRODUCTS = ((300, 256, 512), (1797, 2048, 2048))


def passes() -> Iterator[Row]:
    for rows, width in ROWS:
        x, y = (torch.randn(rows, width, device=DEVICE).to(HALF) for _ in range(2))
        weight, scale = (torch.randn(width, device=DEVICE).to(HALF) for _ in range(2))
        for name in ("rounded", "normalised"):
            made = []
            for count, backend in ((rows, "reference"), (rows, "triton"), (1, "triton")):
                out = torch.full((count, width), 99, device=DEVICE, dtype=INT8)
                scales, how = torch.full((count,), 9.0, device=DEVICE), {"turn": 256, "backend": backend}
                if name == "rounded":
                    rounded(x[:count], out, scales, **how)
                else:
                    normalised(x[:count].clone(), weight, 1e-5, out, scales, y=y[:count], scale=scale, **how)
                made.append((out, out.float() * scales[:, None]))
            (_, want), (codes, got), (one, _) = made
            yield f"{name} {rows} x {width}", error(got, want), TOLERANCE[INT8], torch.equal(codes[:1], one)


def attention() -> Iterator[Row]:
    for tiles, tokens, heads in TILES:
        for dtype in (HALF, torch.bfloat16):
            qkv = torch.randn(tiles * tokens, heads * 192, device=DEVICE).to(dtype)
            if not attends(qkv, 64, "triton"):
                return
            angles = torch.randn(tokens, 24, device=DEVICE)
            rotated(qkv, torch.stack((angles.cos(), angles.sin()), 1), 64, 1e-5, backend="triton")
            want, got, again, alone = (torch.full((tiles * tokens, heads * 64), 9.0, device=DEVICE).to(dtype)
                                       for _ in range(4))  # fmt: skip
            for out, backend in ((want, "reference"), (got, "triton"), (again, "triton")):
                attended(qkv, tokens, 64, out, backend=backend)
            last = slice((tiles - 1) * tokens, None)
            attended(qkv[last], tokens, 64, alone[last], backend="triton")
            name = f"attended {tiles} x {tokens}, {heads} heads, {str(dtype)[6:]}"
            yield name, error(got, want), TOLERANCE[dtype], torch.equal(got, again), torch.equal(got[last], alone[last])


def products() -> Iterator[Row]:
    for rows, n, k in PRODUCTS:
        x, weight = (torch.randint(-127, 128, (count, k), device=DEVICE, dtype=INT8) for count in (rows + 12, n))
        scales, columns = torch.rand(rows + 12, device=DEVICE), torch.rand(n, device=DEVICE) / 1e5
        bias, scale, tokens = (torch.randn(*size, device=DEVICE).to(HALF) for size in ((n,), (n,), (rows, n)))
        sums = torch.empty(sum_rows(rows + 12) * n, device=DEVICE, dtype=torch.int32)
        wide = (x.double() @ weight.double().t())[:rows] * scales[:rows, None] * columns + bias
        want = {"plain": wide, "pairs": torch.nn.functional.silu(wide[:, ::2]) * wide[:, 1::2],
                "added": tokens + wide * scale}  # fmt: skip
        for how, expected in want.items():
            outs = []
            for count in (rows, 17):
                out = tokens[:count].clone() if how == "added" else torch.empty_like(expected[:count], dtype=HALF)
                more = {"scale": scale} if how == "added" else {"pairs": how == "pairs"}
                multiplied(x[: count + 12], weight, scales[: count + 12], columns, bias, out, sums, backend="triton",
                           **more)  # fmt: skip
                outs.append(out)
            name = f"int8 product {how} {rows} x {n} x {k}"
            yield name, error(outs[0], expected), 1e-3, torch.equal(outs[0][:17], outs[1])


def tokens() -> Iterator[Row]:
    yield from passes()
    yield from attention()
    yield from products()
