"""What a decode's operators wait for at a card's ratio: products, memory, or neither."""

from __future__ import annotations

from collections.abc import Iterator

from ..profile import BETWEEN, Profile, Row
from .run import Ratio

#: An operator that keeps a unit busy for this share of its time waits for that unit.
BUSY = 0.7
_LINE = "{:17} {:>5} {:34} {:>9} {:>7} {:>9} {:>8}  {}"


def limits(row: Row, ratio: Ratio) -> tuple[float, float]:
    """Return the milliseconds that an operator's products take at the card's rate, on the GPU at hand, and its bytes
    at the card's bandwidth for each processor and clock.

    Args:
        row: of a profile.
        ratio: the card's.
    """
    # Its share of memory for a processor and clock, as the card has it: the GPU at hand has three times as much.
    card = ratio.gpu
    width = card.bandwidth * 1e9 / (card.processors * card.mhz) * ratio.processors * ratio.mhz
    return 1e-9 * row.flop / ratio.tflops(row.kind), 1e3 * row.moved / width


def lines(found: Profile, ratio: Ratio) -> Iterator[str]:
    """Format the operators of a profile at a ratio, the costliest first, each with what it waits for.

    Arguments as of `limits`."""
    yield _LINE.format("operator", "stage", "what", "ms/frame", "share", "products", "memory", "waits for").rstrip()
    for row in found.rows:
        products, memory = (limit / row.ms if row.ms else 0.0 for limit in limits(row, ratio))
        yield _LINE.format(
            row.operator, row.stage, row.what, f"{row.ms / found.frames:.3f}", f"{100 * row.ms / found.total_ms:.1f} %",
            f"{100 * products:.0f} %" if row.flop else "", f"{100 * memory:.0f} %" if row.moved else "",
            _word(row, products, memory),
        ).rstrip()  # fmt: skip


def _word(row: Row, products: float, memory: float) -> str:
    if row.operator == BETWEEN:
        return "copies, torch's own kernels, the host"
    if memory > 1:
        return "memory on the card, which has less of it"
    if max(products, memory) < BUSY:
        return "neither: issue, latency, the ends of tiles" if row.flop else "not counted"
    return "products" if products >= memory else "memory"
