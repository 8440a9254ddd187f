"""Read what files of LTX-Video say of their VAE besides its tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from ...errors import InputError, one_line
from ...network.architecture import BESIDE
from ...network.values import Border

BORDERS: dict[str, Border] = {"zeros": "zero", "reflect": "reflect", "replicate": "replicate"}


def vae_of(metadata: Mapping[str, object]) -> Mapping[str, Any]:
    """Return the part of a file's description that is about its VAE."""
    text = metadata.get("config")
    if text is None:
        return {}
    try:
        found = json.loads(text) if isinstance(text, str) else text
    except ValueError as error:
        raise InputError(f"its metadata config is no JSON ({error})") from None
    found = found.get("vae") if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def beside_of(metadata: Mapping[str, object]) -> Mapping[str, Any]:
    """Return the description that lies beside a file under diffusers' names; empty if there is none."""
    text = metadata.get(BESIDE)
    found = json.loads(text) if isinstance(text, str) else {}
    return found if str(found.get("_class_name", "")).startswith("AutoencoderKLLTX") else {}


def border(given: Mapping[str, Any], half: str, usual: str) -> Border:
    mode = given.get(f"{half}_spatial_padding_mode", given.get("spatial_padding_mode"))
    mode = usual if mode is None else mode
    if mode not in BORDERS:
        raise InputError(f"spatial_padding_mode={one_line(repr(mode), 40)} is not one of {', '.join(BORDERS)}")
    return BORDERS[mode]


def number(given: Mapping[str, Any], key: str, usual: float) -> float:
    found = given.get(key, usual)
    if not isinstance(found, (int, float)) or not math.isfinite(found):
        raise InputError(f"its metadata says {key}={one_line(repr(found), 40)}, which is no number")
    return float(found)


def blocks_of(given: Mapping[str, Any], key: str) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the blocks that a description lists, as (kind, parameters)."""
    blocks = given.get(key, given.get("blocks")) or []
    return [(kind, rest[0] if rest and isinstance(rest[0], Mapping) else {}) for kind, *rest in blocks]


def shortcuts_of(given: Mapping[str, Any]) -> list[bool]:
    """Return, from the latent on, which of a decoder's resamplings have a shortcut, as diffusers' description says; an
    empty list if it does not."""
    found, there = given.get("upsample_residual"), given.get("decoder_spatio_temporal_scaling")
    if not isinstance(found, list):
        return []
    there = there if isinstance(there, list) and len(there) == len(found) else [True] * len(found)
    return [bool(has) for has, made in zip(found, there, strict=True) if made][::-1]


def said_of(
    listed: list[tuple[str, Mapping[str, Any]]], index: int, place: str
) -> tuple[str, Mapping[str, Any]] | None:
    """Return the description of a block; None if the file has no description."""
    if not listed:
        return None
    if index >= len(listed):
        raise InputError(f"{place} is not in the file's description of its {len(listed)} blocks")
    return listed[index]
