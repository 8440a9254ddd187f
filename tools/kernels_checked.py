"""Check the sets of compiled kernels: complete, small, taken by ptxas without spills, and made of this code.

A card is asked for the kernels that its form shares with others, too: form C of RTX 50 has most of its convolutions
from sets A and B.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from hashlib import sha256
from pathlib import Path

import kernels_wanted
import lower_kernels
from lower_kernels import CARDS, Assembled
from zerowaste_vae.engine.kernels.cards import SHARED_KIB
from zerowaste_vae.engine.kernels.prebuilt.keys import Key
from zerowaste_vae.engine.kernels.prebuilt.library import Library

#: All files together.
MOST_BYTES = 15_000_000
_EVERY_S = 30.0


def check(
    folder: Path, names: list[str], families: frozenset[str] | None, each: kernels_wanted.Each, every: int = 1,
    cache: Path | None = None,
) -> list[str]:  # fmt: skip
    """Return what is wrong with the sets in a folder, one line each.

    Args:
        names, families: of the sets and VAEs that are checked.
        each: as `map`, over several processes.
        every: one of so many kernels is assembled.
        cache: folder of what was walked and assembled before, which is added to.
    """
    library, found = Library(folder), []
    size = sum(path.stat().st_size for path in folder.iterdir())
    if size > MOST_BYTES:
        found.append(f"{size:,} bytes of files, more than {MOST_BYTES:,}")
    kernels_wanted.walk(names, families, each, cache)
    for name in names:
        found += lacking(library, name, families, each)
    for name in names:
        found += taken(library, name, families, each, every, cache)
    return found + stale(folder, names)


def lacking(library: Library, form: str, families: frozenset[str] | None, each: kernels_wanted.Each) -> list[str]:
    """Return the uses of which a form lacks kernels, with the number and one of them."""
    found, there, lacks = [], set(), set()
    for way, (usual, keys) in kernels_wanted.walked(form, families, each).items():
        without = sorted((one for one in keys if not library.has(form, one)), key=str)
        there, lacks = there | keys, lacks.union(without)
        if without:
            what = "" if usual.isdisjoint(without) else " of the tables' own"
            found.append(f"form {form} lacks {len(without)} kernels{what} for {way}: {without[0]}")
    print(f"form {form}: {len(there)} kernels that plans launch, {len(lacks)} lacking", flush=True)
    return found


def taken(
    library: Library, name: str, families: frozenset[str] | None, each: kernels_wanted.Each, every: int,
    cache: Path | None,
) -> list[str]:  # fmt: skip
    """Return which kernels of a set take too much shared memory, are refused by ptxas or spill, one line each, and
    print a line for each card. Arguments as of `check`."""
    found = []
    keys = sorted((one for one in kernels_wanted.wanted(name, families, each) if library.has(name, one)), key=str)
    there = library.kernels(name, keys)
    for one, made in there.items():
        if made.shared > SHARED_KIB << 10:
            found.append(f"set {name}: {one} takes {made.shared} bytes of shared memory")
    asked = [(one, sm) for one in list(there)[::every] for sm in CARDS[name]]
    results: dict[int, list[Assembled]] = defaultdict(list)
    texts = [(there[one].ptx.decode("ascii"), sm) for one, sm in asked]
    for (one, sm), made in zip(asked, _all_assembled(name, texts, each, cache), strict=True):
        results[sm].append(made)
        if made.refused:
            found.append(f"set {name}: {one}: {made.refused}")
        elif made.spilled:
            found.append(f"set {name}: {one}: {made.spilled} bytes spilled on sm_{sm}")
    for sm, some in results.items():
        spilled = [one.spilled for one in some if one.spilled]
        refused = sum(bool(one.refused) for one in some)
        print(f"set {name} for sm_{sm}: {len(some)} assembled, {refused} refused, {len(spilled)} spill (at most "
              f"{max(spilled, default=0)} bytes)", flush=True)  # fmt: skip
    return found


def _all_assembled(
    name: str, texts: list[tuple[str, int]], each: kernels_wanted.Each, cache: Path | None
) -> list[Assembled]:
    """Return what ptxas says of texts, each for a compute capability; of what it said before, from the cache."""
    file = cache and cache / "assembled.jsonl"
    known: dict[str, Assembled] = {}
    if file and file.is_file():
        known = {digest: Assembled(*made) for digest, *made in map(json.loads, file.read_text().splitlines())}
    version = lower_kernels.triton.__version__
    digests = [sha256(f"{version} {sm} {text}".encode()).hexdigest()[:24] for text, sm in texts]
    new = {digest: work for digest, work in zip(digests, texts, strict=True) if digest not in known}
    began = said = time.monotonic()
    for count, (digest, made) in enumerate(zip(new, each(_assembled, list(new.values())), strict=True), 1):
        known[digest] = made
        if file and not made.refused:
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a", encoding="utf-8") as out:
                out.write(json.dumps([digest, *made]) + "\n")
        if time.monotonic() - said > _EVERY_S:
            said = time.monotonic()
            print(f"  set {name}: {count} of {len(new)} assembled after {said - began:.0f} s", flush=True)
    return [known[digest] for digest in digests]


def stale(folder: Path, names: list[str]) -> list[str]:
    """Return which sets were made of other code than this checkout's, by samples of each function's."""
    index, found = json.loads((folder / "index.json").read_bytes()), []
    for name in names:
        for kernel, constants, types, code in index["samples"].get(name, []):
            one = Key(kernel, tuple((n, v) for n, v in constants), tuple(types))
            try:
                same = lower_kernels.code(one, name) == code
            except Exception:  # there is none of this name any more, or it takes other arguments
                same = False
            if not same:
                found.append(f"set {name}: the code of {kernel} is another one than what it was made of")
    return found


def _assembled(what: tuple[str, int]) -> Assembled:
    return lower_kernels.assembled(*what)
