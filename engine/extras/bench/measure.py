"""Benchmark of decode and encode: this pack and its peers, with the same weights and input, in the same run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from ...checkpoints import Checkpoint
from ...errors import CheckpointError, InputError, PlanError, ZeroWasteError
from ...families import detect
from ...loader import load
from ...network.program import Program
from ...vae import VideoVAE
from . import metrics, peers, speed_limit
from .calls import settle, time_calls
from .environment import clocks
from .schema import OURS
from .subject import copy_of, seeded_input


@dataclass(frozen=True)
class Case:
    """One clip to decode or encode: `frames` of `width` x `height` pixels, or as many pictures at once of an image VAE.

    target: VRAM in GB, 0 for automatic. tile, overlap: in pixels."""

    half: str
    precision: str
    frames: int
    width: int
    height: int
    target: float = 0.0
    tiling: str = "auto"
    tile: int = 0
    overlap: int = 64

    def input(self, vae: VideoVAE) -> Tensor:
        """Return the input of every path: a latent as the host scales it (several for an image VAE), or frames."""
        return seeded_input(vae, self.half, self.frames, self.width, self.height)

    @property
    def options(self) -> dict[str, Any]:
        return {"tiling": self.tiling, "tile": self.tile, "overlap": self.overlap, "vram_gb": self.target or None}


class Bench:
    """Measures cases on one device, with one set of weights. Rows are plain dictionaries (extras/bench/schema.py)."""

    def __init__(self, weights: Checkpoint, device: torch.device, runs: int, reference_frames: int,
                 norm_groups: int | None = None) -> None:
        """Prepare measurements of `weights`.

        Args:
            weights: contents of a VAE file.
            device: device to measure on.
            runs: timed calls after the first one.
            reference_frames: frames of the fp32 reference; 0 for none, then rows have no dB.
            norm_groups: groups of norms, where the file does not tell.

        Raises: CheckpointError where the weights belong to no known VAE.
        """
        architecture = detect(weights.tensors)
        if architecture is None:
            raise CheckpointError(f"{weights.path or 'these weights'}: not a VAE this pack knows")
        self.architecture = architecture
        self.weights = weights
        self.device = device
        self.runs = runs
        self.reference_frames = reference_frames
        self.norm_groups = norm_groups
        #: Decoder widths from full to lowest resolution, known after the first load.
        self.widths: list[int] = []
        #: Ceilings by precision, measured once in a run.
        self.ceilings: dict[str, speed_limit.Rates] = {}
        #: Rows have a digest of their result.
        self.digests = False
        self._reference: tuple[Any, Tensor | str] | None = None

    def check(self, case: Case) -> None:
        """Raise InputError or CheckpointError before anything is measured, where no row could run."""
        vae = self.load(case.precision)
        if case.half == "encoder" and not vae.can_encode:
            raise InputError(f"{self.weights.path or 'these weights'}: holds no encoder; bench decode works")

    def load(self, precision: str) -> VideoVAE:
        """Load the weights in `precision` onto the device, from the same tensors each time."""
        vae = load(copy_of(self.weights), precision=precision, device=self.device, norm_groups=self.norm_groups)
        self.architecture, self.widths = vae.architecture, list(vae.model.config.decoder_widths or ())
        return vae

    def rates(self, precision: str) -> speed_limit.Rates:
        """Return the ceilings, measured once in this run."""
        if precision not in self.ceilings:
            settle(self.device)
            self.ceilings[precision] = speed_limit.rates(self.device, precision)
            settle(self.device)
        return self.ceilings[precision]

    def ours(self, case: Case) -> dict[str, Any]:
        """Measure this pack with its defaults. A refused plan becomes a row with the reason; other errors pass."""
        return self._row(case, OURS, lambda vae: vae, (PlanError, torch.OutOfMemoryError))

    def torch_peer(self, case: Case, name: str) -> dict[str, Any]:
        """Measure our reference modules run by torch alone; an error becomes a row with the reason.

        name: a key of peers.TORCH."""
        prepare = peers.TORCH[name]
        if prepare is not peers.compiled:
            return self._row(case, name, lambda vae: prepare(vae, case.half), (Exception,))
        with peers.compiler() as told:
            row = self._row(case, name, lambda vae: prepare(vae, case.half), (Exception,))
            if row["skipped"] is None:
                how = told()
                row["ran"] = f"{row['ran']}; {how}"
                row["skipped"] = None if how else "torch.compile compiled nothing"
            return row

    def comfy_peers(self, case: Case, folder: str, python: str | None) -> Iterator[dict[str, Any]]:
        """Measure ComfyUI's own VAE object, in a process of its own.

        Args:
            case: the clip.
            folder: a checkout of ComfyUI.
            python: its interpreter; None for this one.
        """
        reference = self.reference(case)
        vae = self.load(case.precision)
        base, inputs, spatial = self._base(case, vae), case.input(vae), vae.spatial
        state = {key: value.cpu() for key, value in vae.model.state_dict().items()}
        flat, joined, short = vae.architecture.flat, vae.architecture.joined, self._first(case, inputs)
        del vae
        settle(self.device)
        job = {
            "half": case.half, "precision": case.precision, "device": str(self.device), "runs": self.runs,
            "metadata": dict(self.weights.metadata), "temporal": self.architecture.temporal, "spatial": spatial,
        }  # fmt: skip
        if (flat or joined) and case.half == "decoder":  # a batch of pictures, or of one clip's frames
            inputs, short = (z.transpose(1, 2).flatten(0, 1) for z in (inputs, short))
        for figures, result in peers.comfy(folder, python, state, inputs, short, job):
            if flat and result is not None:
                result = result.unsqueeze(1 if case.half == "decoder" else 2)
            elif joined and result is not None:
                result = (result if case.half == "decoder" else result.movedim(0, 1))[None]
            yield self._finish({**base, **figures}, result, reference)

    def reference(self, case: Case) -> Tensor | str:
        """Return the fp32 result of the first frames alone from the plain modules, or the reason why there is none."""
        key = (case.half, case.frames, case.width, case.height)
        if self._reference is None or self._reference[0] != key:
            self._reference = key, self._make_reference(case)
        return self._reference[1]

    def _make_reference(self, case: Case) -> Tensor | str:
        if not self.reference_frames:
            return "not asked for"
        try:
            vae = self.load("fp32")
            vae.options = vae.options.switched(off=["triton_fusion"])
            first = self._first(case, case.input(vae))
            return vae.decode(first) if case.half == "decoder" else vae.encode(first)
        except (ZeroWasteError, torch.OutOfMemoryError) as error:
            return f"fp32 does not run here: {peers.said(error)}"
        finally:
            settle(self.device)

    def _first(self, case: Case, inputs: Tensor) -> Tensor:
        """Return the part of a case's input that is compared with fp32, as a clip of its own."""
        latents = self.architecture.latents(min(case.frames, max(self.reference_frames, 1)))
        if self.architecture.still:
            return inputs[:latents]
        if case.half == "decoder":
            return inputs[:, :, :latents]
        return inputs[: self.architecture.frames(latents)]

    def _compared(self, case: Case, program: Program, run: Callable[[Tensor], Tensor], inputs: Tensor,
                  result: Tensor) -> Tensor:
        """Return the result to compare with fp32.

        It is the beginning of the whole result, unless that depends on later input: then the first part is run alone.
        """
        first = self._first(case, inputs)
        if first.shape == inputs.shape or self.architecture.still or program.reach[1] == 0:
            return result
        return run(first)

    def _row(self, case: Case, who: str, prepare: Callable[[VideoVAE], VideoVAE],
             refusals: tuple[type[Exception], ...]) -> dict[str, Any]:
        reference = self.reference(case)
        vae = self.load(case.precision)
        row = self._base(case, vae) | {"who": who}
        inputs = case.input(vae)
        try:
            vae = prepare(vae)
            run = vae.decode if case.half == "decoder" else vae.encode
            figures, result = time_calls(lambda: run(inputs, **case.options), self.runs, self.device)
            told = vae.last_report
            if not isinstance(reference, str):
                program = getattr(vae.model, case.half).program
                result = self._compared(case, program, lambda part: run(part, **case.options), inputs, result)
        except refusals as error:
            return row | {"skipped": peers.said(error)}
        finally:
            vae = run = None
            settle(self.device)
        if self.digests:
            row["digest"] = sha256((result.float().cpu() + 0.0).numpy().tobytes()).hexdigest()[:16]
        # From the last run's own report, not from what was meant to run. The plan begins with the mode's first words.
        plan = told.plan.removeprefix(told.mode.partition(" (")[0]).lstrip(", ")
        row |= figures | {
            "ran": f"{told.mode}, {plan}", "fused": told.mode.startswith("fused"), "stated_gb": told.predicted_gb,
            "off": dict(told.off), "events": {name: count for name, count in told.events.items() if count},
        }  # fmt: skip
        return self._finish(row, result, reference)

    def _size(self, case: Case) -> tuple[int, int, int]:
        """Return (latents, height, width) of the latent."""
        spatial = self.architecture.spatial
        return self.architecture.latents(case.frames), case.height // spatial, case.width // spatial

    def _base(self, case: Case, vae: VideoVAE) -> dict[str, Any]:
        work = speed_limit.work(vae.architecture, vae.model.config, case.half, *self._size(case))
        work = speed_limit.in_form(work, vae.planner.walk, case.half, *self._size(case)[1:])
        rates = self.rates(case.precision)
        return {
            "half": case.half, "precision": vae.precision, "width": case.width, "height": case.height,
            "frames": case.frames, "target_gb": case.target or None, "skipped": None, "ceilings": vars(rates),
            "floor_s": speed_limit.seconds(work, case.precision, rates.matrix, rates.copy),
            "tflop": work.flop * 1e-12, "composed_tflop": work.composed_flop * 1e-12, "values": work.values,
        }  # fmt: skip

    def _finish(self, row: dict[str, Any], result: Tensor | None, reference: Tensor | str) -> dict[str, Any]:
        """Add the derived figures: ms per frame, share of the speed limit, dB."""
        if row["skipped"] is not None:
            return row
        row |= {
            "ms_per_frame": 1e3 * row["median_s"] / row["frames"],
            "floor_share": row["floor_s"] / row["median_s"],
            "clocks": clocks(self.device),
        }
        row["db"], row["db_note"] = quality(result, reference, row["half"])
        return row


def quality(result: Tensor | None, reference: Tensor | str, half: str) -> tuple[float | None, str]:
    """Return (dB, what it measures), or (None, the reason why there is none).

    Pixels: PSNR with peak 2 in -1..1 (peak 1 in 0..1) over the values that fp32 leaves unclamped, because the output of
    `decode` is clamped. Latents: power of the fp32 latent over that of the error.

    Args:
        result: frames of a decode or latents of an encode; None if none came back.
        reference: fp32 result of the first frames, or the reason why there is none.
        half: "decoder" or "encoder".
    """
    if isinstance(reference, str) or result is None:
        return None, reference if isinstance(reference, str) else "no result came back"
    if half == "decoder":
        part = result[tuple(map(slice, reference.shape))]
        inside = (reference > 0) & (reference < 1)
        error = (part.double() - reference.double())[inside].square().mean().item()
        peak, note = 1.0, f"PSNR of the first {reference.shape[0] * reference.shape[1]} frames against fp32"
    else:
        part = result[tuple(map(slice, reference.shape))].double()
        error = (part - reference.double()).square().mean().item()
        peak = reference.double().square().mean().sqrt().item()
        note = f"signal to error of the first {reference.shape[0] * reference.shape[2]} latents against fp32"
    if not math.isfinite(error):
        return None, "the result holds NaN or infinity"
    if error == 0:
        return None, "equal to fp32"
    return metrics.psnr(error, peak), note
