"""Weights of transformer blocks as their products take them, in 16 bit or for the most part in 8 bit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...kernels.targets import kernels_for
from ...network.products import coded
from .kernels.blocks import feeds, fuses, turned_columns


class Weight(nn.Module):
    """A norm without a bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))


class Attention(nn.Module):
    """Parameters of one block's attention."""

    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.q_norm, self.k_norm = Weight(head), Weight(head)


class Gate(nn.Module):
    """Parameters of one block's gated products."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = -(-4 * width // 16) * 16
        self.w_up, self.w_gate = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.w_down = nn.Linear(inner, width, bias=False)


class Block(nn.Module):
    """x += attention(norm1(x)); x += gate(norm2(x))."""

    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = Weight(width), Attention(width, head), Weight(width), Gate(width)


class Scales(NamedTuple):
    """Scales of the rows of a block's 8-bit weights, float32. None: one kernel runs all of the MLP, in 16 bit."""

    qkv: Tensor
    gates: Tensor | None = None
    down: Tensor | None = None


class Norms(NamedTuple):
    """Norms of a block's queries and keys, float32 [2, head], and a number that no logit exceeds."""

    values: Tensor
    bound: float

    @classmethod
    def of(cls, blocks: Sequence[Block]) -> list[Norms]:
        """Take the norms of blocks with heads of one size. The host waits for the device once."""
        queries = torch.stack([block.attn.q_norm.weight for block in blocks]).float()
        keys = torch.stack([block.attn.k_norm.weight for block in blocks]).float()
        head = queries.shape[1]
        values = torch.stack((queries * head**-0.5, keys), 1)
        bounds = [math.inf] * len(blocks) if values.is_meta else values.abs().amax(2).prod(1).tolist()
        return [cls(*each) for each in zip(values, (head * bound for bound in bounds), strict=True)]


@dataclass(frozen=True)
class Weights:
    """A block's weights as its products take them. bound: no logit exceeds it. fused: the norms are part of the weights
    after them. gates: the product in SiLU and the other; fused: one with the rows of both in turn. scales: of fused
    8-bit products; the one behind the attention and that of the context are in 16 bit, because memory limits both. fed:
    one kernel runs all after the attention, in 16 bit, and `down` has its columns in that kernel's order."""

    fused: bool
    fed: bool
    scales: Scales | None
    norm1: Tensor
    qkv: Tensor
    qkv_bias: Tensor
    norms: Tensor
    proj: Tensor
    proj_bias: Tensor
    norm2: Tensor
    gates: list[Tensor]
    biases: list[Tensor] | None
    down: Tensor
    bound: float

    @classmethod
    def of(
        cls, block: Block, norms: Norms, modulation: Sequence[Tensor] | None = None, kind: str | None = None
    ) -> Weights:
        """Take a block's weights.

        Args:
            norms: the block's own.
            modulation: float32 [C] each: scale and shift after the first norm, scale and shift after the second.
            kind: type of 8-bit operands, "fp8" or "int8", of a block that the fused products take; None: all are those
                of the weights.
        """
        a, m, dtype = block.attn, block.mlp, block.attn.qkv.weight.dtype
        width, head = a.proj.weight.shape[0], norms.values.shape[1]
        # A CPU shows the numbers that a GPU's 8-bit kernels have.
        fused = kind is not None or kernels_for(a.qkv.weight.device, "auto") is not None
        fused = fused and fuses(width, head, dtype)
        narrow = fused and kind is not None
        fed = fused and feeds(width, m.w_down.weight.shape[1], a.qkv.weight.device)
        norm1, norm2, shift1, shift2 = block.norm1.weight.float(), block.norm2.weight.float(), None, None
        if modulation is not None:
            scale1, shift1, scale2, shift2 = modulation
            norm1, norm2 = norm1 * (1.0 + scale1), norm2 * (1.0 + scale2)

        def normed(t: Tensor, norm: Tensor) -> Tensor:
            made = t.float() * norm if fused else t
            return made if narrow else made.to(dtype)

        qkv, qkv_bias, down, scales = a.qkv.weight, a.qkv.bias.float(), m.w_down.weight, None
        gates, biases = [m.w_gate.weight, m.w_up.weight], None
        if shift1 is not None:
            qkv_bias = qkv_bias + qkv.float() @ shift1
            biases = [t.float() @ shift2 for t in gates]
        if fused:  # one product has the rows of both in turn
            gates = [normed(torch.stack(gates, 1).flatten(0, 1), norm2)]
            biases = None if biases is None else [torch.stack(biases, 1).flatten()]
        proj_bias = a.proj.bias.float()
        if not fused:  # weights of a softmax sum up to 1: the values' bias reaches the result as it is
            proj_bias = proj_bias + a.proj.weight.float() @ qkv_bias[2 * width :]
        qkv = normed(qkv, norm1)
        if fed:
            gates, down = [gates[0].to(dtype)], turned_columns(down)
        if narrow and fed:
            qkv, of_qkv = coded(qkv, kind)
            scales = Scales(of_qkv)
        elif narrow:
            (qkv, of_qkv), (gates[0], of_gates), (down, of_down) = (coded(t, kind) for t in (qkv, gates[0], down))
            scales = Scales(of_qkv, of_gates, of_down)
        return cls(
            fused, fed, scales, norm1.to(dtype), qkv, qkv_bias.to(dtype), norms.values, a.proj.weight,
            proj_bias.to(dtype), norm2.to(dtype), gates, None if biases is None else [b.to(dtype) for b in biases],
            down, norms.bound,
        )  # fmt: skip

    def without(self, block: Block) -> Weights:
        """Return these without the block's own parameters, which may leave the device while the others are kept."""
        own = {name: None for name, value in _own(block).items() if _same(getattr(self, name), value)}
        return replace(self, **own)

    def whole(self, block: Block) -> Weights:
        """Return these with the block's own parameters again."""
        return replace(self, **{name: value for name, value in _own(block).items() if getattr(self, name) is None})


def _own(block: Block) -> dict[str, Tensor | list[Tensor]]:
    """Return the parameters that products may take as they are."""
    a, m = block.attn, block.mlp
    return {"qkv": a.qkv.weight, "proj": a.proj.weight, "gates": [m.w_gate.weight, m.w_up.weight],
            "down": m.w_down.weight}  # fmt: skip


def _same(ours: Tensor | list[Tensor], theirs: Tensor | list[Tensor]) -> bool:
    return ours[0] is theirs[0] if isinstance(ours, list) else ours is theirs
