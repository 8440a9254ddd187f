"""A VAE on several devices of this process.

Its weights are copied once to each further device, except those that stay in host memory."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from ..execution.core import Core
from ..network.hosted import staying


def on(vae: Core, devices: Sequence[torch.device]) -> list[Core]:
    """Return the VAE for each of the devices.

    Copies stay until its `release` or `release_copies`, or until its weights change."""
    out: list[Core] = []
    vae.follow()
    for device in devices:
        place = device, sum(o.device == device for o in out)
        if place == (vae.device, 0):
            out.append(vae)
            continue
        if place not in vae._copies:
            vae._copies[place] = _copied(vae, device)
        vae._copies[place].options = vae.options
        out.append(vae._copies[place])
    return out


def _copied(vae: Core, device: torch.device) -> Core:
    other = copy.copy(vae)
    other._separate()
    other.device, other.on_pressure = device, None
    there = next((c for c in (vae, *vae._copies.values()) if c.home == other.home), None)
    if there is None:
        shared = {id(p): p for p in staying(vae.model)}
        other.model = other._loaded = copy.deepcopy(vae.model, shared).to(device)
        other._identify()
        other.store = vae.store  # the same weights
    else:
        other.model, other._loaded, other._made_of = there.model, there._loaded, there._made_of
    other._use(vae.options)
    return other
