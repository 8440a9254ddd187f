"""Compiles the kernels that ship: PTX for GPUs without Triton, in engine/kernels/prebuilt/sets.

    PYTHONPATH=FOLDER python tools/build_kernels.py [--sets A,B,C,D] [--families NAME,...] [--out DIR] [--cache DIR]
    PYTHONPATH=FOLDER python tools/build_kernels.py --tests --out DIR [--sets C] [--cache DIR]
    PYTHONPATH=FOLDER python tools/build_kernels.py --check [--rebuild] [--sets ...] [--jobs N] [--cache DIR]

FOLDER holds this checkout as zerowaste_vae. Needs Triton 3.6.0 and no GPU. Two builds are the same bytes. A build that
was ended goes on where it was with --cache, as a check does, and one after a change compiles only the kernels that it
changed. The sets are rebuilt last, once a change of kernels is done, by one person: each build is megabytes of history.

--check asks whether the sets hold every kernel that a plan can launch, whether each fits its cards' shared memory and
is assembled for all of them without spills, and whether the code is still what it was. It writes nothing but the cache,
prints what is wrong, and its exit code is 1 then. With --rebuild it also compiles everything again, in another folder,
and compares the files byte by byte: give it a cache that this checkout's sets were not built with.

--tests copies the sets and adds the kernels of the GPU tests' models, whose widths no published file has; with
ZEROWASTE_SETS=DIR the tests run them without Triton.
"""

from __future__ import annotations

import argparse
import functools
import json
import lzma
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import zlib
from collections import defaultdict
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any

import kernels_checked
import kernels_wanted
import lower_kernels
from zerowaste_vae.engine.kernels.prebuilt.keys import Key
from zerowaste_vae.engine.kernels.prebuilt.library import FOLDER, MADE_OF, Library

SETS = tuple(lower_kernels.FORMS)
_BEGAN = time.monotonic()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", default=",".join(SETS), help="letters of those to build or check (default: all)")
    parser.add_argument("--families", default="", help="only kernels of these families, such as demo,seedvr2")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the sets (default: the checkout's)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: one for each core)")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="assemble one of N kernels (default: all)")
    parser.add_argument("--check", action="store_true", help="check the sets in the folder; change nothing in it")
    parser.add_argument("--rebuild", action="store_true", help="with --check: build them again, and compare the files")
    parser.add_argument("--tests", action="store_true", help="copy the sets to --out and add the tests' kernels")
    parser.add_argument("--cache", type=Path, help="keep what was walked, compiled and assembled in this folder, "
                        "and take it from there")  # fmt: skip
    args = parser.parse_args(argv)
    names, families = args.sets.split(","), frozenset(filter(None, args.families.split(","))) or None
    if not set(names) <= set(SETS):
        parser.error(f"--sets {args.sets}: there are {', '.join(SETS)}")
    if args.tests and args.out.resolve() == FOLDER:
        parser.error("--tests: give a folder with --out, these kernels do not ship")
    if args.rebuild and not args.check:
        parser.error("--rebuild goes with --check")
    if (args.rebuild or not args.check) and lower_kernels.triton.__version__ != lower_kernels.VERSION:
        parser.error(f"Triton {lower_kernels.triton.__version__} is here: sets are made with {lower_kernels.VERSION}")
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        each = functools.partial(pool.imap, chunksize=1)
        if args.check:
            found = kernels_checked.check(args.out, names, families, each, args.every, args.cache)
            if args.rebuild:
                found += differing(args.out, names, families, each, args.cache)
            print("\n".join(found), f"{len(found)} lines of what is wrong" if found else "all checks passed", sep="\n")
            return int(bool(found))
        failed = (add_tests if args.tests else build)(args.out, names, families, each, args.cache)
        print("".join(f"{line}\n" for line in failed), end="", file=sys.stderr)
        return int(bool(failed))


# -- build -------------------------------------------------------------------------------------------------------------


def build(
    out: Path, names: list[str], families: frozenset[str] | None, each: kernels_wanted.Each, cache: Path | None = None
) -> list[str]:
    """Write the files of sets and their index. cache: folder of compiled kernels. Returns which kernels cannot ship and
    why, one line each: what needs one of them runs as if there were no set."""
    names = sorted(names)  # a form's kernels are numbered after those of the sets before it
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("*.xz"):
        old.unlink()
    told: dict[str, Any] = {"format": 1, "triton": lower_kernels.VERSION, "samples": {}, "maps": [], "sets": {}}
    there: set[Key] = set()
    raw: dict[tuple[str, str], bytes] = {}
    failed: list[str] = []
    kernels_wanted.walk(names, families, each, cache)
    wanted = {name: kernels_wanted.wanted(name, families, each) for name in names}
    for name, made in compiled(wanted, each, cache, failed).items():
        there |= set(made)
        parts, kernels = in_parts(made, wanted[name], told["maps"])
        raw |= {(name, part): text for part, text in parts.items()}
        versions = sorted({one.ptx.partition("\n")[0].removeprefix(".version ") for one in made.values()})
        target = lower_kernels.FORMS[name].target
        index = told["sets"][name] = {"parts": {}, "kernels": kernels, "target": target, "versions": versions}
        numbers = {digest: number for number, digest in enumerate(_order(told, name))}
        index["covers"] = {use: [numbers[digest] for digest in digests]
                           for use, digests in kernels_wanted.covered(name, there, families, each).items()}  # fmt: skip
        told["samples"][name] = _samples(name, made, each)
    told["code"] = sha256(json.dumps(told["samples"], sort_keys=True).encode()).hexdigest()[:16]
    write(out, told, raw, each)
    size = sum(path.stat().st_size for path in out.iterdir())
    print(f"{out}: {size / 1e6:.2f} MB", flush=True)
    return failed


def differing(
    folder: Path, names: list[str], families: frozenset[str] | None, each: kernels_wanted.Each, cache: Path | None
) -> list[str]:
    """Build the sets again, and return which files in a folder are not the same bytes. Arguments as of `build`."""
    with tempfile.TemporaryDirectory() as again:
        failed = build(Path(again), names, families, each, cache)
        first, second = ({path.name: path.read_bytes() for path in one.iterdir()} for one in (folder, Path(again)))
    other = sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))
    return failed + [f"{name} is not the same bytes in a second build" for name in other]


def compiled(
    wanted: dict[str, Iterable[Key]], each: kernels_wanted.Each, cache: Path | None, failed: list[str]
) -> dict[str, dict[Key, lower_kernels.Lowered]]:  # fmt: skip
    """Return the kernels of sets, compiled, without those that cannot ship: each of these is a line of `failed`."""
    work = [(one, name, cache) for name, keys in wanted.items() for one in sorted(keys, key=str)]
    print(", ".join(f"set {name}: {len(list(keys))} kernels" for name, keys in wanted.items()), flush=True)
    made: dict[str, dict[Key, lower_kernels.Lowered]] = {name: {} for name in wanted}
    for (one, name, _), text in zip(work, each(_lowered, work), strict=True):
        if isinstance(text, str):
            failed.append(f"set {name} goes without {one}: {text}")
        else:
            made[name][one] = text
    print(f"compiled after {time.monotonic() - _BEGAN:.0f} s", flush=True)
    return made


def add_tests(
    out: Path, names: list[str], families: frozenset[str] | None, each: kernels_wanted.Each, cache: Path | None = None
) -> list[str]:
    """Write a copy of the sets that ship with the kernels of the GPU tests' models beside them. Arguments and result as
    of `build`."""
    shutil.copytree(FOLDER, out, dirs_exist_ok=True)
    told, library = json.loads((out / "index.json").read_bytes()), Library()
    raw, failed = {}, []
    for name in names:
        digests = {form: _order(told, form) for form in told["sets"] if name in MADE_OF[form]}
        models, others = kernels_wanted.of_tests(name, each)
        lacks = [one for one in others.union(*models.values()) if not library.has(name, one)]
        made = compiled({name: lacks}, each, cache, failed)[name]
        parts, kernels = in_parts(made, dict.fromkeys(made, frozenset(["tests"])), told["maps"])
        raw |= {(name, part): text for part, text in parts.items()}
        told["sets"][name]["kernels"] |= kernels
        for form, before in digests.items():  # whose kernels have other numbers now
            numbers, covers = {digest: n for n, digest in enumerate(_order(told, form))}, told["sets"][form]["covers"]
            for found in covers.values():
                found[:] = [numbers[before[number]] for number in found]
            if form == name:
                covers |= {use: sorted(numbers[one.digest] for one in keys) for use, keys in models.items()
                           if all(one.digest in numbers for one in keys)}  # fmt: skip
    write(out, told, raw, each)
    return failed


def _order(told: dict[str, Any], form: str) -> list[str]:
    """The digests of a form's kernels, in the order in which `Library.texts` numbers them."""
    return [one for name in MADE_OF[form] for one in sorted(told["sets"].get(name, {"kernels": ()})["kernels"])]


def write(out: Path, told: dict[str, Any], raw: dict[tuple[str, str], bytes], each: kernels_wanted.Each) -> None:
    """Write the parts of sets, by set and name, and the index, which says where each is."""
    largest = sorted(raw, key=lambda place: -len(raw[place]))
    for (name, part), data in zip(largest, each(compressed, [raw[place] for place in largest]), strict=True):
        file = f"{name}.{part}.xz"
        (out / file).write_bytes(data)
        told["sets"][name]["parts"][part] = {"file": file, "sha256": sha256(data).hexdigest()}
        print(f"  {file}: {len(raw[name, part]) / 2**20:.1f} MiB, {len(data) / 2**10:.0f} KiB", flush=True)
    text = json.dumps(told, separators=(",", ":"), sort_keys=True)
    (out / "index.json").write_text(text + "\n", encoding="utf-8", newline="\n")


def in_parts(
    made: dict[Key, lower_kernels.Lowered], users: dict[Key, frozenset[str]], maps: list[Any]
) -> tuple[dict[str, bytes], dict[str, list[Any]]]:
    """Return the text of a set's parts, and what the index says of its kernels. maps: of all sets, which is added
    to."""
    parts: dict[str, list[Key]] = defaultdict(list)
    for one in made:
        parts[part_of(one, users[one])].append(one)
    raw, kernels = {}, {}
    for part, keys in parts.items():
        at, texts = 0, []
        for one in sorted(keys, key=alike):
            text = made[one].ptx.encode("ascii")
            places = [_place(maps, [*m[:3], list(m[3])]) for m in made[one].maps]
            kernels[one.digest] = [part, at, len(text), made[one].shared, made[one].warps, places]
            texts.append(text)
            at += len(text)
        raw[part] = b"".join(texts)
    return raw, kernels


def part_of(one: Key, users: frozenset[str]) -> str:
    """Return the file that a kernel is in, with others that are used where it is."""
    return f"{next(iter(users)) if len(users) == 1 else 'shared'}-{kernels_wanted.operands(one)}"


def alike(one: Key) -> tuple[Any, ...]:
    """Return what kernels are put in order by, so that those with similar code follow each other."""
    tiles = ("BM", "BN", "BK", "TAIL", "REST", "num_warps", "num_stages", "STAGES", "ACC", "SLICES")
    known = dict(one.constants)
    return one.kernel, *(str(known.get(name)) for name in tiles), str(one)


def compressed(text: bytes) -> bytes:
    size = max(1 << 16, 1 << (len(text) - 1).bit_length())
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": min(size, 1 << 26), "lc": 4,
                "lp": 0, "pb": 0}]  # fmt: skip
    return lzma.compress(text, filters=filters)


def _place(maps: list[Any], one: list[Any]) -> int:
    if one not in maps:
        maps.append(one)
    return maps.index(one)


def _lowered(what: tuple[Key, str, Path | None]) -> lower_kernels.Lowered | str:
    one, name, cache = what
    path = cache and cache / name / lower_kernels.source(one, name)
    if path and path.is_file():
        *known, maps = json.loads(zlib.decompress(path.read_bytes()))
        return lower_kernels.Lowered(*known, tuple((*m[:3], tuple(m[3])) for m in maps))
    try:
        made = lower_kernels.lowered(one, name)
    except lower_kernels.LoweringError as error:
        return str(error)
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_bytes(zlib.compress(json.dumps(made).encode()))
        part.replace(path)
    return made


def _samples(name: str, keys: Iterable[Key], each: kernels_wanted.Each) -> list[list[Any]]:
    """A kernel of each function, with a digest of its code."""
    firsts: dict[str, Key] = {}
    for one in sorted(keys, key=str):
        firsts.setdefault(one.kernel, one)
    codes = each(_code, [(one, name) for one in firsts.values()])
    return [[*one, code] for one, code in zip(firsts.values(), codes, strict=True)]


def _code(what: tuple[Key, str]) -> str:
    return lower_kernels.code(*what)


if __name__ == "__main__":
    sys.exit(main())
