"""Sections in time: clips whose latents are not one frame and then equally many for each later latent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Sections:
    """Sizes of sections in time.

    Sections of `frames` become `latents`, which a decoder takes with the next `more`; it makes `rate` frames of each,
    and leaves out the first `lead` of those of every `latents`. An encode leaves out the last `drop` latents."""

    frames: int = 17
    latents: int = 5
    more: int = 2
    rate: int = 4
    lead: int = 3
    drop: int = 3
    #: Each is made by itself, in tiles: both are part of the model.
    in_tiles: ClassVar[bool] = False

    @property
    def blended(self) -> int:
        """Return the number of frames that two sections of a decode share."""
        return self.rate * self.more - self.lead

    def decoded(self, latents: int) -> int:
        """Return the number of frames that `latents` become."""
        return self.rate * latents - self.lead * -(-latents // self.latents)

    def encoded(self, frames: int) -> int:
        """Return the number of latents that `frames` become."""
        return 1 if frames == 1 else self.latents * -(-frames // self.frames) - self.drop

    def filled(self, frames: int) -> int:
        """Return the least number of frames, at least `frames`, whose latents decode to as many again."""
        if frames <= 1:
            return frames
        return self.frames * max(0, -(-(frames - self.blended) // self.frames)) + self.blended

    def at(self, latent: int) -> int:
        """Return the number of frames that come before those of a latent."""
        return self.frames * (latent // self.latents) + max(0, self.rate * (latent % self.latents) - self.lead)

    def read(self, latent: int) -> int:
        """Return the number of frames that must be there, or a clip's end, before it is known that it has so many
        latents: of its last section it has no more than the first."""
        certain = latent % self.latents in range(1, self.latents - self.drop + 1)
        return self.at(latent) if certain or not self.drop else self.frames * -(-latent // self.latents) + 1

    def latent_of(self, frame: int) -> int:
        """Return the latent that a frame belongs to."""
        section, place = divmod(frame, self.frames)
        return self.latents * section + (place + self.lead) // self.rate

    def reads(self, first: int, end: int) -> tuple[int, int]:
        """Return the frames [a, b) that must be there before latents [first, end) of a clip can be encoded."""
        return self.at(first), self.read(end)
