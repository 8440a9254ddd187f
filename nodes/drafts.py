"""Decodes by tiny decoders: a draft in place of the VAE's own decode, and a film of all frames while that runs."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from ..engine import InputError, log
from ..engine.errors import one_line
from ..engine.families import TINY
from . import files, tiny
from .conversion import from_file
from .host import EngineVAE
from .panel import KNOWN, Question, answer, network_of
from .reports import Outcome
from .runs import PREVIEW_SIZE
from .services import interrupted, pictures_here, say_here, shows_previews, unload
from .settings import Settings

#: ComfyUI's own code runs a VAE.
HOST = "ComfyUI's own code runs this VAE, and nothing tells whose latents it decodes"
#: Why a draft is not compared with ComfyUI's own decode.
NOT_COMPARED = "the last run was a draft"
#: Pictures of a film in a second, and the most that it has: of longer clips it leaves some out, evenly.
RATE, MOST = 12, 256


def check(found: tiny.Found | str) -> tiny.Found:
    """Return a tiny decoder's file. Raises InputError, in one line, where there is none."""
    if isinstance(found, str):
        raise InputError(f"No draft: {found}; switch Draft off for the VAE itself")
    return found


def draft(vae: EngineVAE, samples: Tensor, wishes: Settings) -> tuple[Tensor, Outcome]:
    """Decode LATENT samples of a VAE by the tiny decoder of its latents; return the frames and the outcome of the run.

    A VAE that is such a decoder itself decodes as ever. Raises InputError where there is none.
    """
    if vae.engine.arch in TINY:
        return vae.run_decode(samples, wishes)
    found = check(tiny.find(vae.engine.arch, vae.file))
    decoder = _loaded(found, vae.device)
    frames, outcome = decoder.run_decode(samples, wishes)
    if vae.layout.joined and decoder.layout.still:
        frames = frames.transpose(0, 1)  # one clip, as the VAE's own
    outcome.plan |= {"draft": found.title, "model": vae.name, "compare_off": NOT_COMPARED}
    outcome.notes.append(f"draft by {found.name} ({found.title}): the VAE itself did not run")
    if decoder.engine.colours[1] < vae.engine.colours[1]:
        outcome.notes.append("a draft has no transparency, which the VAE's own frames have")
    return frames, outcome


def planned(question: Question, *here: object) -> dict[str, object]:
    """Return the panel's answer for a draft. here: more arguments of `answer`. Raises InputError where there can be
    none."""
    network = network_of(question.model)
    asked = replace(question, draft=0)
    if network is None or network[0].name in TINY:
        plan = answer(asked, *here)
        if plan.get("host"):
            check(HOST)
        return plan
    file = "" if question.draft > 1 and KNOWN.forgetful else question.model  # as its run will know it
    found = check(tiny.find(network[0].name, file))
    plain = Question()  # the tiny decoder is loaded without the wishes of the VAE's own nodes
    plan = answer(replace(asked, model=found.name, precision=plain.precision, options=plain.options), *here)
    return plan | {"model": question.model, "draft": found.title}


def _loaded(found: tiny.Found, device: torch.device) -> EngineVAE:
    stat = found.path.stat()
    return _read(found, (stat.st_mtime_ns, stat.st_size), device)


@functools.lru_cache(maxsize=1)
def _read(found: tiny.Found, stamp: tuple[int, int], device: torch.device) -> EngineVAE:
    return from_file(found.path, "auto", None, Settings(), found.name, device)


class Film(NamedTuple):
    """Whether pictures of all frames are shown while a decode runs, and notes for its outcome."""

    plays: bool
    notes: list[str]


@contextmanager
def film(vae: EngineVAE, samples: Tensor, wishes: Settings) -> Iterator[Film]:
    """Play a film of all frames on the running node while the body decodes them, where the user has previews on and
    the tiny decoder is here: the frames of the first clip, small, one after the other.

    Whatever happens to the film is said once, and the decode goes on.
    """
    show = pictures_here() if shows_previews() else None
    if show is None or vae.layout.still or vae.layout.joined or vae.engine.arch in TINY:
        yield Film(False, [])
        return
    latent, frames, notes = vae.layout.latent(samples)[:1], None, list[str]()
    try:
        frames = _small(vae, latent, wishes, notes) if latent.shape[2] > 1 else None
    except Exception as error:
        if isinstance(error, interrupted()):
            raise
        _failed(error, notes)
    if frames is None:
        yield Film(False, notes)
        return
    player = _Player(frames, show, notes)
    try:
        yield Film(True, notes)
    finally:
        player.stop()


def _small(vae: EngineVAE, latent: Tensor, wishes: Settings, notes: list[str]) -> Tensor | None:
    """Return the frames of a film, uint8 [F, H, W, 3], of a latent [1, C, T, h, w], and note what it took; None where
    no tiny decoder is here, which the log says.

    The tiny decoder's run has a plan of its own, within the same limits and beside other models, and leaves the card
    before the decode is planned.
    """
    found = tiny.find(vae.engine.arch, vae.file)
    if isinstance(found, str):
        log.once(f"decode: no preview of all frames: {found}", log.info)
        return None
    say_here("decode: preview of all frames")
    started, decoder = time.perf_counter(), _loaded(found, vae.device)
    longer = max(latent.shape[3:]) * vae.engine.spatial / PREVIEW_SIZE
    less = latent if longer <= 1 else _thinned(latent.float(), max(2, round(longer)))
    settings = Settings(vram_gb=wishes.vram_gb, ram_gb=wishes.ram_gb, keep_models="always")
    try:
        frames, size = _every(decoder, less, settings, -(-decoder.engine.frames(less.shape[2]) // MOST))
    finally:
        if decoder.device.type != "cpu":
            unload(decoder.patcher)
    took = time.perf_counter() - started
    notes.append(f"preview of all frames by {found.name}: {took:.2f} s and {size:.2f} GB before the decode")
    return frames


def _every(vae: EngineVAE, latent: Tensor, settings: Settings, step: int) -> tuple[Tensor, float]:
    """Return every `step`-th frame of a latent [1, C, T, h, w], uint8 [F, H, W, 3], and the GB that the run was planned
    with. The others are dropped as they come: a clip of any length takes the same host memory."""
    size, kept, done = vae.layout.latent_size(latent.shape), list[Tensor](), 0
    with (
        vae.running("decode", size, settings, {"output": "uint8"}, told=False) as run,
        closing(vae.engine.stream(latent, any_vae=True, **run.options)) as pieces,
    ):
        for piece in pieces:
            kept.append(piece[0, -done % step :: step].clone())
            done += piece.shape[1]
    return torch.cat(kept), vae.outcome(run, size, settings).plan["predicted_gb"]


def _thinned(latent: Tensor, part: int) -> Tensor:
    """Return a latent [1, C, T, h, w] of a `part` of its sides: averages, with the deviation that each channel had.

    With TAEF2's trained weights and a picture of 768x480, halved, this is 22.6 dB from the picture that is halved after
    it was decoded; averages alone are 21.1 dB and pale, every second latent is 20.3 dB.
    """
    clip = latent[0].transpose(0, 1)
    less = F.interpolate(clip, size=[max(1, side // part) for side in clip.shape[2:]], mode="area")
    (now, mean), (before, _) = (torch.std_mean(x, (0, 2, 3), correction=0, keepdim=True) for x in (less, clip))
    return (mean + (less - mean) * (before / now.clamp(min=1e-6))).transpose(0, 1)[None]


def _failed(error: Exception, notes: list[str]) -> None:
    why = files.without_folders(str(error)) or type(error).__name__
    text = f"no preview of all frames: {one_line(why, 200)}"
    log.once(f"decode: {text}")
    notes.append(text)


class _Player:
    """Shows pictures one after the other, over and over, in a thread of its own."""

    def __init__(self, frames: Tensor, show: Callable[[Image.Image], bool], notes: list[str]) -> None:
        self._frames, self._show, self._notes, self._over = frames, show, notes, threading.Event()
        self._thread = threading.Thread(target=self._play, name="zerowaste-film", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Return once no more pictures come."""
        self._over.set()
        self._thread.join()

    def _play(self) -> None:
        try:
            for frame in itertools.cycle(self._frames):
                if not self._show(Image.fromarray(frame.numpy())) or self._over.wait(1 / RATE):
                    return
        except Exception as error:
            _failed(error, self._notes)
