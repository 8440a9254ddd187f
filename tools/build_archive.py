"""Build the archive for the Comfy registry and check it.

    python tools/build_archive.py [--owner GITHUB_NAME] [--out dist]

It leaves dist/zerowaste-vae (which `comfy node publish` uploads when run inside it) and dist/zerowaste-vae.zip. They
hold the tracked files that .comfyignore does not name, with workflows/ as example_workflows/. The addresses of the
icon, the banner, the documentation and the issue tracker, the address to clone in README and docs/install.md, and those
of what the pages link to and the archive leaves out, follow from `Repository` in pyproject.toml, the one place to fill.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAME = "zerowaste-vae"
#: Largest files in all, and largest archive; the demo VAE of 9 MB and the prebuilt kernels are most of it.
MOST_BYTES, MOST_PACKED = 40 << 20, 30 << 20
#: Files that must be in it, and folders that must not.
NEEDED = (
    "__init__.py", "pyproject.toml", "requirements.txt", "LICENSE", "NOTICE", "README.md", "CHANGELOG.md",
    "engine/__init__.py", "engine/kernels/prebuilt/sets/index.json",
    "nodes/__init__.py", "web/js/zerowaste.js", "locales/en/main.json", "assets/demo_vae.safetensors",
)  # fmt: skip
REFUSED = ("tests", "workflows", "registry", "tools/train_demo", ".github", ".ci")
COMPILED = re.compile(r"(^|/)__pycache__/|\.py[cod]$")
#: Code that the registry's scan flags. `subprocess` is allowed in the bench and in tuning (below).
FLAGGED = re.compile(
    r"(?<![\w.])(?:eval|exec)\(|\bos\.system\(|^\s*(?:import|from) (?:subprocess|pickle)", re.MULTILINE
)


def shipped() -> list[str]:
    """Return the tracked files that go into the archive, relative to the repository."""

    def listed(*options: str) -> set[str]:
        command = ["git", "ls-files", "-z", *options]
        return set(subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0"))

    paths = listed() - listed("-ci", "--exclude-from=.comfyignore") - {""}
    return sorted(path for path in paths if (ROOT / path).is_file())


def stage(target: Path, owner: str | None) -> None:
    """Lay the files out under `target`, which is emptied first."""
    shutil.rmtree(target, ignore_errors=True)
    for path in shipped():
        copy(ROOT / path, target / path)
    for path in sorted((ROOT / "workflows").iterdir()):
        copy(path, target / "example_workflows" / path.name)
    project = target / "pyproject.toml"
    text = project.read_text(encoding="utf-8")
    (repository,) = re.findall(r'^Repository = "(.+)"$', text, re.M)
    if owner:
        repository = repository.replace("OWNER", owner)
    project.write_text(addressed(text, repository), encoding="utf-8")
    for page in target.rglob("*.md"):
        said = page.read_text(encoding="utf-8").replace("URL_OF_THIS_REPOSITORY", repository)
        page.write_text(linked(said, page, target, repository), encoding="utf-8")


def linked(text: str, page: Path, target: Path, repository: str) -> str:
    """Return a page whose links to files that `target` lacks lead to the repository."""

    def link(found: re.Match) -> str:
        place = (page.parent / found[1]).resolve()
        if "://" in found[1] or place.exists():
            return found[0]
        return f"]({repository}/blob/main/{place.relative_to(target.resolve()).as_posix()}"

    return re.sub(r"\]\(([^)#\s]+)", link, text)


def addressed(text: str, repository: str) -> str:
    """Return pyproject.toml with every address that follows from that of the repository."""
    raw = repository.replace("https://github.com/", "https://raw.githubusercontent.com/") + "/main/registry"
    urls = f'Repository = "{repository}"\nDocumentation = "{repository}#readme"\nIssues = "{repository}/issues"'
    text = re.sub(r'^Repository = ".+"$', lambda _: urls, text, flags=re.M)
    pictures = f'Icon = "{raw}/icon.png"\nBanner = "{raw}/banner.png"\n'
    return re.sub(r'^DisplayName = ".+"\n', lambda found: found.group() + pictures, text, flags=re.M)


def copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target, follow_symlinks=False)


def problems(target: Path) -> list[str]:
    """Return the faults of a staged archive, one line each."""
    files = {path.relative_to(target).as_posix(): path for path in target.rglob("*") if path.is_file()}
    found = [f"{name} is missing" for name in NEEDED if name not in files]
    # Managed installations of ComfyUI refuse a pack for these.
    links = [path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_symlink()]
    found += [f"{name} is a link" for name in links]
    found += [f"{name} is compiled Python" for name in files if COMPILED.search(name)]
    found += [f"{name} must not be shipped" for name in files if name.startswith(tuple(f"{r}/" for r in REFUSED))]
    templates = [name for name in files if name.startswith("example_workflows/") and name.endswith(".json")]
    if not templates:
        found.append("example_workflows has no workflow")
    found += [f"{name} has no picture beside it" for name in templates if f"{name[:-5]}.jpg" not in files]
    for name in templates:
        json.loads(files[name].read_text(encoding="utf-8"))
    for name, path in files.items():
        if name.endswith(".py"):
            flagged = {match.group().strip() for match in FLAGGED.finditer(path.read_text(encoding="utf-8"))}
            # Comparisons with other programs, and kernels that may end a process, need processes of their own.
            own = name.startswith(("engine/extras/bench/", "engine/extras/tuning/"))
            bad = [call for call in sorted(flagged) if not (own and "subprocess" in call)]
            found += [f"{name}: the registry's scan flags {call!r}" for call in bad]
    size = sum(path.stat().st_size for path in files.values())
    if size > MOST_BYTES:
        found.append(f"{size >> 20} MiB of files, more than {MOST_BYTES >> 20}")
    return found


def pack(target: Path) -> Path:
    archive = target.with_suffix(".zip")
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as out:
        for path in sorted(target.rglob("*")):
            if path.is_file():
                out.write(path, path.relative_to(target).as_posix())
    return archive


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--owner", help="GitHub name that takes the place of OWNER in pyproject.toml")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder (default: dist)")
    args = parser.parse_args()
    target = args.out / NAME
    stage(target, args.owner)
    found = problems(target)
    for line in found:
        print(line, file=sys.stderr)
    if found:
        return 1
    archive = pack(target)
    size = archive.stat().st_size
    print(f"{archive}: {size / 2**20:.1f} MiB")
    if size > MOST_PACKED:
        print(f"more than {MOST_PACKED >> 20} MiB", file=sys.stderr)
        return 1
    if "/OWNER/" in (target / "pyproject.toml").read_text(encoding="utf-8"):
        print("not to be published yet: fill Repository in pyproject.toml, or give --owner")
    return 0


if __name__ == "__main__":
    sys.exit(main())
