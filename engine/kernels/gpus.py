"""Table of GPUs by name: processors, clock, products a clock, memory. Plain data, no torch.

Published figures. Sources, by letter: w NVIDIA's architecture whitepapers and product pages as cited by a list of GPUs
(github.com/lamonoai/gpumap), l lists of the RTX 30 and 40 series (github.com/stillwater-sc/KPU-Simulator,
rtx_30_series_specs_table.md; github.com/CYBIRD-D/How-to-Choose-your-LLM-Model-for-translation,
Nvidia_GPU_Specification.md), f fpsbench.com's and h hmc-tech.com's page of the card, d CUDA's own answer for the card
in a public log.
`real`: the clock that a card's rate of products implies under load (github.com/zzc0721/torch-performance-test-data),
as one user measured it, or what one of its generation reaches; the listed boost clock where nobody measured one.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from . import cards


class Gpu(NamedTuple):
    """A GPU.

    name: as people write it. sm: compute capability (89 for 8.9). processors: SMs. mhz: listed boost clock. real: clock
    under load, the same where not known. bandwidth: GB/s of its memory (10^9 bytes). l2: MB of its second cache.
    memory: GB, one or several. rates: its row of RATES. source: letters of this file's sources.
    """

    name: str
    sm: int
    processors: int
    mhz: int
    real: int
    bandwidth: int
    l2: int
    memory: tuple[int, ...]
    rates: str
    source: str

    @property
    def products(self) -> dict[str, int]:
        """Multiply-adds a clock and processor by kind: sums in fp32 ("f32"), in fp16 ("f16"), of int8 ("s32")."""
        return RATES[self.rates]

    def tflops(self, kind: str) -> float:
        """Return the TFLOP/s (int8: TOP/s) of a kind of product at the listed clock."""
        return 2e-6 * self.products[kind] * self.processors * self.mhz


#: Multiply-adds a clock and processor, dense. GeForce halves sums in fp32; cards for workstations and servers do not.
#: "hopper": what mma.sync reaches there, measured on an H200 by its own clock, which was 1776 MHz meanwhile: a product
#: of 16x8x16 every six clocks of a quarter of a processor. Its wgmma makes more.
RATES = {
    "geforce": {"f32": 256, "f16": 512, "s32": 1024},
    "full": {"f32": 512, "f16": 512, "s32": 1024},
    "a100": {"f32": 1024, "f16": 1024, "s32": 2048},
    "hopper": {"f32": 1361, "f16": 1361, "s32": 2722},
}
#: Row of RATES -> whether layers in 16 bit have their Winograd form by default (kernels/conv3d/winograd2d), which makes
#: 2.25 times fewer products. At the ratio of a GeForce, on an H200, a convolution of 128 channels takes 13.5 ms in it
#: and 27.6 without. With full rates the direct form takes 15.1 by the line of its times (docs/ratio.md), and this one
#: less than its 13.5. On data-centre cards it gains nothing, and would change the bits of frames.
WINOGRAD = {"geforce": True, "full": True, "a100": False, "hopper": False}
#: KiB of shared memory of a block, and of a processor, and warps that it holds, by compute capability.
SHARED = {80: (163, 164, 64), 86: (99, 100, 48), 89: (99, 100, 48), 90: (227, 228, 64), 120: (99, 100, 48),
          121: (99, 100, 48)}  # fmt: skip

GPUS = (
    Gpu("RTX 3050", 86, 20, 1777, 1777, 224, 2, (8,), "geforce", "l"),
    Gpu("RTX 3060", 86, 28, 1777, 1777, 360, 3, (12,), "geforce", "w, l"),
    Gpu("RTX 3060 Ti", 86, 38, 1665, 1665, 448, 4, (8,), "geforce", "w, l"),
    Gpu("RTX 3070", 86, 46, 1725, 1725, 448, 4, (8,), "geforce", "w, l"),
    Gpu("RTX 3070 Ti", 86, 48, 1770, 1770, 608, 4, (8,), "geforce", "l"),
    Gpu("RTX 3080", 86, 68, 1710, 1710, 760, 5, (10,), "geforce", "w, l"),
    Gpu("RTX 3080 12 GB", 86, 70, 1710, 1710, 912, 6, (12,), "geforce", "l"),
    Gpu("RTX 3080 Ti", 86, 80, 1665, 1665, 912, 6, (12,), "geforce", "l"),
    Gpu("RTX 3090", 86, 82, 1695, 1695, 936, 6, (24,), "geforce", "l"),
    Gpu("RTX 3090 Ti", 86, 84, 1860, 1860, 1008, 6, (24,), "geforce", "w, l"),
    Gpu("RTX 4060", 89, 24, 2460, 2650, 272, 24, (8,), "geforce", "f"),
    Gpu("RTX 4060 Ti", 89, 34, 2535, 2650, 288, 32, (8, 16), "geforce", "l, f"),
    Gpu("RTX 4070", 89, 46, 2475, 2650, 504, 36, (12,), "geforce", "w, l"),
    Gpu("RTX 4070 Ti", 89, 60, 2610, 2650, 504, 48, (12,), "geforce", "w, l"),
    Gpu("RTX 4070 Ti Super", 89, 66, 2610, 2650, 672, 48, (16,), "geforce", "l, f"),
    Gpu("RTX 4080", 89, 76, 2505, 2650, 717, 64, (16,), "geforce", "w, l"),
    Gpu("RTX 4080 Super", 89, 80, 2550, 2650, 736, 64, (16,), "geforce", "f"),
    Gpu("RTX 4090", 89, 128, 2520, 2650, 1008, 72, (24,), "geforce", "w, h"),
    Gpu("L4", 89, 58, 2040, 2040, 300, 48, (24,), "full", "w"),
    Gpu("L40S", 89, 142, 2520, 2520, 864, 96, (48,), "full", "w"),
    Gpu("RTX 5060 Ti", 120, 36, 2572, 2620, 448, 32, (8, 16), "geforce", "f, d"),
    Gpu("RTX 5070", 120, 48, 2512, 2700, 672, 48, (12,), "geforce", "w"),
    Gpu("RTX 5070 Ti", 120, 70, 2452, 2760, 896, 48, (16,), "geforce", "w"),
    Gpu("RTX 5080", 120, 84, 2617, 2390, 960, 64, (16,), "geforce", "w"),
    Gpu("RTX 5090", 120, 170, 2407, 2700, 1792, 96, (32,), "geforce", "w"),
    Gpu("RTX PRO 6000", 120, 188, 2617, 2170, 1792, 128, (96,), "full", "h"),
    Gpu("A100 80 GB", 80, 108, 1410, 1410, 2039, 40, (80,), "a100", "w"),
    Gpu("H100", 90, 132, 1980, 1980, 3352, 50, (80,), "hopper", "w"),
    Gpu("H200", 90, 132, 1980, 1980, 4800, 50, (141,), "hopper", "w"),
    Gpu("GB10", 121, 48, 2418, 1930, 273, 24, (128,), "full", "h"),
)  # fmt: skip
#: Other words for names of the table.
_ALSO = {"dgxspark": "gb10"}
#: Words that say nothing about which card it is.
_NOISE = re.compile(r"nvidia|geforce|quadro|tesla|generation|graphics|gpu|card|edition|founders|blackwell|workstation|"
                    r"server|sxm\d?|hbm3e?|pcie")  # fmt: skip
_MEMORY = re.compile(r"(?<!\d)(\d{1,3}) ?GB?\b", re.IGNORECASE)
#: A GeForce among a maker's words, "MSI RTX 5070 Ti Gaming Trio"; not "RTX 4090 D", which is another card.
_GEFORCE = re.compile(r"(?<![a-z0-9])(?:rtx)?[ _-]*([345]0[5-9]0)[ _-]*(ti)?[ _-]*(super)?(?![a-z0-9]|[ _-]d\b)")
#: Names of series, without blanks -> their compute capability. Those before 80 run plain torch.
_SERIES = ((r"^rtx\d\d00.*ada", 89), (r"^rtxa\d\d00", 86), (r"^rtxpro\d\d00", 120), (r"rtx30\d0", 86),
           (r"rtx40\d0", 89), (r"rtx50\d0", 120), (r"rtx20\d0|gtx16\d0|titanrtx|^rtx[34568]000$|^t4$|^t\d\d00$", 75),
           (r"^v100|titanv$", 70), (r"gtx10\d0|titanx|^p40$|^p4$", 61), (r"^p100", 60), (r"^b200|^gb200", 100),
           (r"^b300|^gb300", 103), (r"^(gh|h)[12]00|^h[28]0|^h800", 90), (r"^l(4|20|40s?)$", 89),
           (r"^a(2|10g?|16|40)$", 86), (r"^a(30|100|800)", 80))  # fmt: skip
_LAPTOP = re.compile(r"laptop|mobile|notebook|max-?q")


class Found(NamedTuple):
    """A GPU that a text names: as written, its compute capability, and its row of the table, if it has one. why: reason
    for no row."""

    name: str
    sm: int
    gpu: Gpu | None = None
    why: str = ""


def find(text: str, option: str) -> Found:
    """Return the GPU that a text names as people write it: "5070ti", "RTX PRO 6000", "sm_89", "RTX 4090 Laptop GPU".

    Args:
        text: what the user wrote.
        option: its option, for errors.

    Raises: InputError where no known generation matches.
    """
    name, laptop = " ".join(text.split()), _LAPTOP.search(text.lower()) is not None
    size = _MEMORY.search(name)
    row = None if laptop else _row(name)
    if row is not None:
        if size is None:
            return Found(row.name, row.sm, row)
        if (chosen := int(size[1])) in row.memory:
            return Found(row.name, row.sm, row._replace(memory=(chosen,)))
        return Found(name, row.sm, None, f"{row.name} is known here with {' or '.join(map(str, row.memory))} GB")
    why = "makers set a laptop GPU's clock and power" if laptop else "its figures are not kept here"
    if re.fullmatch(r"(?:sm_?)?\d{1,2}\.?\d", name, re.IGNORECASE):
        why = ""  # a generation, which has no figures
    series = next((sm for pattern, sm in _SERIES if re.search(pattern, _key(name))), None)
    return Found(name, series or cards.find(name, option)[1], None, why)


def winograd(name: str, sm: int) -> bool:
    """Return whether layers in 16 bit have their Winograd form by default on a GPU: by its row of the table, or else by
    its generation.

    Args:
        name: as CUDA or a user names it.
        sm: its compute capability (89 for 8.9).
    """
    row = _row(name)
    if row is not None and row.sm == sm:
        return WINOGRAD[row.rates]
    return sm in (86, 89) or sm >= 120


def _row(name: str) -> Gpu | None:
    bare = _MEMORY.sub(" ", name)
    row = _ROWS.get(_key(name)) or _ROWS.get(_key(bare))
    if row is None and len(among := _GEFORCE.findall(bare.lower())) == 1:
        row = _ROWS.get(_key("".join(among[0])))
    return row


def _key(text: str) -> str:
    bare = re.sub(r"[\s_-]+", "", _NOISE.sub("", text.lower()))
    bare = _ALSO.get(bare, bare)
    return f"rtx{bare}" if re.match(r"[345]0\d0|pro\d000|a\d000", bare) else bare


_ROWS = {_key(gpu.name): gpu for gpu in GPUS}
