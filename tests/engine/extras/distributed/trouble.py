"""Decodes that fail on the way."""

import torch
from zerowaste_vae.engine.execution import call

call_decode = call.decode


class Failing:
    """call.decode, which fails on the copies of a VAE behind their first frames, or only once."""

    def __init__(self, vae, error, after=1, once=False):
        self.own, self.error, self.after, self.calls = vae, error, after, []
        self.once, self.failed = once, False

    def __call__(self, core, z, request, tick, results, wanted, *rest):
        self.calls.append((core is self.own, wanted))
        if core is self.own or (self.once and self.failed):
            yield from call_decode(core, z, request, tick, results, wanted, *rest)
            return
        made = range(wanted.start, wanted.start + self.after)
        if self.after:
            yield from call_decode(core, z, request, tick, results, made, *rest)
        self.failed = True
        raise self.error


def overflows(monkeypatch, where):
    """fp16 decodes do where where(first result of their part, results so far) says so."""
    original = call.clip.decode

    def poisoned(half, z, plan, results, guard, wanted):
        for step in original(half, z, plan, results, guard, wanted):
            if half._dtype == torch.float16 and where(wanted.start, results.done):
                raise call.NonFinite(0, results.done, 1)
            yield step

    monkeypatch.setattr(call.clip, "decode", poisoned)
