"""Turn the results of `measure_ratio.py measure` into the tables of docs/ratio.md and the data of `plan --card`."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from zerowaste_vae.engine.extras.bench.expected import Expected, expected, in_winograd
from zerowaste_vae.engine.families import by_name
from zerowaste_vae.engine.kernels.gpus import Gpu, find
from zerowaste_vae.engine.options import DEFAULTS

BEGIN, END = "<!-- tables: tools/measure_ratio.py page -->", "<!-- end of tables -->"
#: Operators that take less than this share of a decode are one row of the data.
_SMALL = 0.004


def write(files: list[Path], root: Path) -> int:
    """Write the page's tables, a section for each file, and the data of all of them, where later files replace what
    earlier ones have of the same decode."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    entries: dict[str, dict[str, Any]] = {}
    for one in found:
        for case in (case for case in measured(one) if "rows" in case):
            entries[name_of(one, case)] = entry_of(one, case)
    data = {"format": 1, "entries": [entries[name] for name in sorted(entries)]}
    lines = ",\n".join(json.dumps(entry) for entry in data["entries"])
    place = root / "engine" / "extras" / "bench" / "ratio.json"
    place.write_text(f'{{"format": 1, "entries": [\n{lines}\n]}}\n', encoding="utf-8")
    page = root / "docs" / "ratio.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    tables = "\n\n".join("\n".join(section(one, entries)) for one in found)
    page.write_text(f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}", encoding="utf-8")
    print(f"{place}: {len(entries)} decodes; {page}")
    return 0


def measured(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the cases of a file that were measured."""
    return [case for case in found["cases"] if "failed" not in case]


def toggles(case: Mapping[str, Any]) -> list[str]:
    """Return the toggles by which `plan` finds a decode: those that it was asked for, where its precision has them."""
    a = by_name(case["family"])
    options = replace(DEFAULTS, winograd="winograd" in case["on"])
    program = a.program("decoder", a.published.config)
    return ["winograd"] * in_winograd(options, program, case["precision"])


def name_of(found: Mapping[str, Any], case: Mapping[str, Any]) -> str:
    """Return what names a decode among the entries."""
    return " ".join((case["family"], case["precision"], found["rates"], *toggles(case)))


def entry_of(found: Mapping[str, Any], case: Mapping[str, Any]) -> dict[str, Any]:
    """Return a decode's entry of the data: per frame, clocks of a processor in millions and GB."""
    a, mhz = by_name(case["family"]), case.get("mhz", found["mhz"])
    total = sum(row["ms"] for row in case["rows"])
    rows: list[dict[str, Any]] = []
    rest: dict[bool, dict[str, Any]] = {}
    for row in case["rows"]:
        made = {"name": " ".join(filter(None, (row["operator"], row["stage"], row["what"]))),
                "products": row["kind"] is not None, "clocks": row["ms"] * found["processors"] * mhz * 1e-3,
                "gb": row["gb"], "l2_gb": row["l2_gb"]}  # fmt: skip
        if row["ms"] >= _SMALL * total:
            rows.append(made)
            continue
        into = rest.setdefault(made["products"], made | {"name": "the rest", "clocks": 0.0, "gb": 0.0, "l2_gb": 0.0})
        for figure in ("clocks", "gb", "l2_gb"):
            into[figure] += made[figure]
    rounded = [{key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in row.items()}
               for row in (*rows, *rest.values())]  # fmt: skip
    return {
        "family": case["family"], "half": "decoder", "precision": case["precision"], "rates": found["rates"],
        "on": toggles(case), "frames": case["frames"],
        "latents": [a.latents(case["frames"]), case["height"] // a.spatial, case["width"] // a.spatial],
        "source": found.get("source") or f"operators timed at the ratio of {found['card']} on {found['gpu']}, "
        f"{found['time']}",
        "host_ms": round(max(case["ratio"]["median"] - total, 0.0), 2), "rows": rounded,
    }  # fmt: skip


def section(found: Mapping[str, Any], entries: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of one file's section. entries: the data, with which decodes that were not timed by operator are
    compared."""
    k, own = found["factors"], found["measured"]
    rates = ", ".join(f"{own[kind]:.0f} {words} (k {k[kind]:.2f})" for kind, words in
                      (("f32", "with fp32 sums"), ("f16", "with fp16 sums"), ("s32", "in int8")))  # fmt: skip
    yield f"### {found['title'] or 'Measured'}: at the ratio of {found['card']}"
    yield ""
    about = (f"{found['gpu']} at {found['mhz']:.0f} MHz, PyTorch {found['torch']}, prebuilt set {found['form']}, "
             f"{found['time']}. Multiply-adds a clock and processor by mma.sync: {rates}. Frames of both columns have "
             "the same bits, where nothing else is said.")  # fmt: skip
    yield from textwrap.wrap(about, 120)
    yield ""
    whole = not any("rows" in case for case in measured(found))
    more = ["GB reserved, stated", f"computed for {found['gpu']}, error"] if whole else ["operators with products"]
    heads = ["decode", "as it is, ms a frame", "at the ratio", *more, f"computed for {found['card']}"]
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for case in found["cases"]:
        name = f"{by_name(case['family']).published.title}, {case['precision']}"
        name += "".join(f", `--on {toggle}`" for toggle in case["on"])
        name += f", {case['width']}x{case['height']}x{case['frames']}"
        if "failed" in case:
            yield f"| {name} | not timed: {case['failed'].partition(': ')[2]} |" + " |" * (len(heads) - 2)
            continue
        cells = of_whole(found, case, entries.get(name_of(found, case))) if whole else of_rows(found, case)
        yield f"| {' | '.join((name, spread(case['plain']), spread(case['ratio']), *cells))} |"
    if knee := found.get("knee"):
        yield ""
        each = (f"{row['ms']:.2f} ({row['low']:.2f} to {row['high']:.2f}) at {row['k']:.2f}" for row in knee)
        words = "One 3x3x3 convolution of 128 channels (4x720x1280, fp16, residual and sums), ms at k: "
        yield from textwrap.wrap(f"{words}{', '.join(each)}.", 120)


def of_rows(found: Mapping[str, Any], case: Mapping[str, Any]) -> tuple[str, str]:
    """Return the last cells of a decode that was timed by operator."""
    if "rows" not in case:
        return "not timed", "not timed"
    products = sum(row["ms"] for row in case["rows"] if row["kind"])
    return f"{products:.1f}", between(computed(find(found["card"], "card").gpu, case, entry_of(found, case)), ".0f")


def of_whole(
    found: Mapping[str, Any], case: Mapping[str, Any], entry: Mapping[str, Any] | None
) -> tuple[str, str, str]:  # fmt: skip
    """Return the last cells of a decode that was timed as a whole, beside what `plan --card` computes of an entry: for
    the card, and for the GPU of the measurement with the card's products."""
    memory = f"{case['reserved_gb']:.2f}, {case['stated_gb']:.2f}"
    if entry is None:
        return memory, "no times by operator", "no times by operator"
    mhz, card = round(found["mhz"]), find(found["card"], "card").gpu
    here = find(found["gpu"], "gpu").gpu._replace(mhz=mhz, real=mhz, rates=found["rates"])
    own = computed(here, case, entry)
    off = [round(100 * (ms / case["ratio"]["median"] - 1), 1) + 0.0 for ms in own]  # + 0.0: no "-0.0"
    return (memory, f"{between(own, '.1f')} ({between(off, '+.1f')} %)",
            between(computed(card, case, entry), ".0f"))  # fmt: skip


def between(values: Iterable[float], form: str) -> str:
    """Format the ends of a range, one where they are alike."""
    return " to ".join(dict.fromkeys(f"{value:{form}}" for value in values))


def spread(figures: Mapping[str, float] | None) -> str:
    """Format a median with its range, where more than one call was kept. None: it was not measured."""
    if figures is None:
        return "not measured"
    if figures["low"] == figures["high"]:
        return f"{figures['median']:.1f}"
    return f"{figures['median']:.1f} ({figures['low']:.1f} to {figures['high']:.1f})"


def computed(gpu: Gpu, case: Mapping[str, Any], entry: Mapping[str, Any]) -> tuple[float, float]:
    """Return the least and the most ms a frame that a decode's entry gives on a GPU, of the clip that was timed."""
    a = by_name(case["family"])
    form, data = "winograd" in entry["on"], {"format": 1, "entries": [entry]}
    made = expected(gpu, a, a.published.config, "decoder", case["precision"], *entry["latents"], form, data)
    if not isinstance(made, Expected):
        raise RuntimeError(made)
    return 1e3 * made.low / made.frames, 1e3 * made.high / made.frames
