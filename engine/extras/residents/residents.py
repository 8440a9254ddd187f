"""Models that lie on the card beside a run, as data for plans: what each holds, and what it costs to move it."""

from __future__ import annotations

from dataclasses import dataclass

from .link import Link


@dataclass(frozen=True)
class Resident:
    """A model of the surrounding program on the card, in bytes.

    loaded: of it on the card. leaves: of these, those that can leave. pinned, buffered: shares of it with a copy in
    page-locked and in other host memory; the rest is read from its file. copied: what leaves is copied to host memory
    first. again: its next use is certain, as that of a model that samples; text encoders' results are kept.
    """

    name: str
    loaded: int
    leaves: int
    pinned: float = 0.0
    buffered: float = 0.0
    copied: bool = False
    again: bool = True

    def seconds(self, size: int, link: Link) -> float:
        """Return what moving `size` bytes costs until they are back; 0 where the model's next use is not certain."""
        if not self.again:
            return 0.0
        file = max(0.0, 1 - self.pinned - self.buffered)
        back = self.pinned / link.pinned + self.buffered / link.pageable + file / link.disk
        return size * (back + self.copied / link.pageable)


@dataclass(frozen=True)
class Card:
    """A card and the models on it just before a run is planned, in bytes.

    free: what nobody uses. own: of the run's own weights, those there already. floor: what the surrounding program
    frees before it loads the run's weights, however little the run takes. models: in the order in which they leave.
    """

    free: int
    own: int = 0
    floor: int = 0
    models: tuple[Resident, ...] = ()

    @property
    def leaves(self) -> int:
        """Return the bytes of all models that can leave."""
        return sum(m.leaves for m in self.models)

    def needs(self, peak: int, spare: int) -> int:
        """Return the bytes that are to be free before the run's weights are loaded.

        A stated peak has everything in it, the weights that are there already too. spare: bytes that stay free
        besides."""
        return max(peak - self.own + spare, self.floor)

    def seconds(self, size: int, link: Link) -> float:
        """Return what it costs that `size` bytes leave, one model after the other."""
        total = 0.0
        for model in self.models:
            out = min(size, model.leaves)
            total, size = total + model.seconds(out, link), size - out
        return total
