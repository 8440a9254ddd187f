"""Map diffusers' names of MiniMax H3's networks to the original ones, and merge what those files keep apart."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from ...errors import InputError

#: (diffusers' name, original name), as regular expressions.
_NAMES = tuple((re.compile(old), new) for old, new in (
    (r"decoder\.proj_in\.(.+)", r"decoder.x_embedder.\1"),
    (r"(decoder\.transformer_blocks\.\d+\.attn)\.to_out\.0\.(.+)", r"\1.to_out.\2"),
    (r"(decoder\.transformer_blocks\.\d+\.ff)\.net\.2\.(.+)", r"\1.w2.\2"),
    (r"encoder\.down_blocks\.(\d+)\.resnets\.(\d+)\.conv_shortcut\.(.+)", r"encoder.down.\1.block.\2.nin_shortcut.\3"),
    (r"encoder\.down_blocks\.(\d+)\.resnets\.(\d+)\.(.+)", r"encoder.down.\1.block.\2.\3"),
    (r"encoder\.down_blocks\.(\d+)\.downsamplers\.0\.(conv\..+)", r"encoder.down.\1.downsample.\2"),
))  # fmt: skip
_QUERY = re.compile(r"(decoder\.transformer_blocks\.\d+\.)attn\.to_q\.(weight|bias)")
#: Channels of a head.
_HEAD = 64


def native(names: list[str]) -> dict[str, str | None]:
    """Return {diffusers' name: original name, None if there is none}."""
    return {name: next((old.sub(new, name) for old, new in _NAMES if old.fullmatch(name)), None) for name in names}


def merged(tensors: Mapping[str, Tensor], file: str = "") -> dict[str, Tensor]:
    """Return a network's tensors with queries, keys and values of each head in one product, as original files have
    them: rows in order of head, part and channel. Gates come before the values that they multiply, which is the other
    way round in these files, and the decoder has its unused `mask_token`. Tensors of other files stay as they are.
    Raises InputError for shapes that are none of heads."""
    out = dict(tensors)
    for name in tensors:
        if not (m := _QUERY.fullmatch(name)):
            continue
        layer, leaf = m.groups()
        parts, gate = [f"{layer}attn.to_{part}.{leaf}" for part in "qkv"], f"{layer}ff.net.0.proj.{leaf}"
        if all(part in out for part in parts):
            found = [out.pop(part) for part in parts]
            if any(t.shape != found[0].shape or not t.ndim or len(t) % _HEAD for t in found):
                shapes = ", ".join(str(list(t.shape)) for t in found)
                raise InputError(f"{', '.join(parts)} have the shapes {shapes}, which are no heads of {_HEAD} channels")
            heads = [t.unflatten(0, (-1, _HEAD)) for t in found]
            out[f"{layer}attn.to_qkv.{leaf}"] = torch.stack(heads, 1).flatten(0, 2)
        if gate in out:
            out[f"{layer}ff.w1.{leaf}"] = torch.cat(out.pop(gate).chunk(2)[::-1])
    if len(out) < len(tensors) and (tokens := out.get("decoder.register_tokens")) is not None:
        out.setdefault("decoder.mask_token", tokens.new_zeros(1, 1, tokens.shape[-1]))
    return out
