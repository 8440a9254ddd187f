"""The installed package is complete, imports are light, and the README is true."""

import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
import zerowaste_vae
from PIL import Image
from safetensors.torch import save_file
from zerowaste_vae.engine.extras.bench.subject import random_checkpoint
from zerowaste_vae.engine.extras.cli import COMMANDS, main, parser_of
from zerowaste_vae.engine.extras.media.latents import write_latent
from zerowaste_vae.engine.extras.media.mp4 import write_mp4
from zerowaste_vae.engine.extras.media.pngs import write_png
from zerowaste_vae.engine.families import ARCHITECTURES, by_name

from .engine.families.small import WHOLE

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it there

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
README = (ROOT / "README.md").read_text(encoding="utf-8")
#: Page -> its text.
PAGES = {p: p.read_text(encoding="utf-8") for p in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
#: With the help, the operators' notes and the log.
EVERY_PAGE = {
    page: page.read_text(encoding="utf-8")
    for pages in (ROOT.glob("*.md"), *((ROOT / top).rglob("*.md") for top in ("assets", "docs", "engine", "web")))
    for page in pages
}
NOT_PACKAGES = {"tests", "tools", "build", "dist"}


def test_every_package_is_listed():
    found = {"zerowaste_vae"}
    for file in ROOT.glob("*/**/__init__.py"):
        parts = file.parent.relative_to(ROOT).parts
        if parts[0] not in NOT_PACKAGES and not parts[0].startswith("."):
            found.add(".".join(("zerowaste_vae", *parts)))
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == found


def test_every_module_is_in_a_package():
    """A folder without __init__.py would be left out of an installation."""
    for top in ("engine", "nodes"):
        for file in (ROOT / top).rglob("*.py"):
            assert (file.parent / "__init__.py").exists(), file


def test_data_files_are_listed():
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["zerowaste_vae"]
    listed = {file for pattern in patterns for file in ROOT.glob(pattern)}
    sets = ROOT / "engine" / "kernels" / "prebuilt" / "sets"
    assert listed >= {file for folder in (ROOT / "assets", sets) for file in folder.rglob("*") if file.is_file()}
    assert sets / "index.json" in listed
    assert zerowaste_vae.demo_vae_path() in listed


def test_requirements_are_the_base_dependencies():
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").split()
    assert lines == PROJECT["project"]["dependencies"]
    assert not any(line.startswith("torch") for line in lines)
    assert any(line.startswith("torch>=") for line in PROJECT["project"]["optional-dependencies"]["standalone"])


def test_version_and_entry_point():
    assert PROJECT["project"]["version"] == zerowaste_vae.__version__
    module, _, function = PROJECT["project"]["scripts"]["zerowaste-vae"].partition(":")
    assert callable(getattr(import_module(module), function))


def test_import_is_light():
    """ComfyUI imports every pack at its start. Only torch, which it has loaded by then, may be heavy."""
    program = """
import sys
import zerowaste_vae
zerowaste_vae.load, zerowaste_vae.VideoVAE, zerowaste_vae.read_checkpoint
heavy = ("triton", "comfy", "comfy_api", "av", "PIL", "matplotlib", "scipy", "skimage", "tqdm")
print(sorted({name.partition(".")[0] for name in sys.modules} & set(heavy) - before))
"""
    # torch is taken first, so that what it imports itself does not count.
    program = "import sys, torch\nbefore = {name.partition('.')[0] for name in sys.modules}\n" + program
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_dir_shows_public_names_alone():
    assert dir(zerowaste_vae) == sorted([*zerowaste_vae.__all__, "__version__"])
    assert {"read_video", "write_mp4", "load", "VideoVAE"} < set(dir(zerowaste_vae))


def test_public_names_exist():
    for name in zerowaste_vae.__all__:
        assert getattr(zerowaste_vae, name) is getattr(zerowaste_vae.engine, name)
    for module in (zerowaste_vae, zerowaste_vae.engine):
        with pytest.raises(AttributeError, match="no_such_name"):
            _ = module.no_such_name


def test_names_of_pages_exist():
    """What the pages import from the package is there."""
    text = "\n".join(PAGES.values())
    names = {n.strip() for line in re.findall(r"^from zerowaste_vae import (.+)$", text, re.M) for n in line.split(",")}
    names |= set(re.findall(r"\bzerowaste_vae\.([a-z]\w+)\(", text))
    assert names >= {"read_latent", "LatentFile", "load", "write_mp4"} and names <= set(zerowaste_vae.__all__)


def test_old_import_paths():
    """Old import paths of the documentation work."""
    code = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from zerowaste_vae.engine.files.media import read_video
    from zerowaste_vae.engine.files.mp4 import write_mp4
import zerowaste_vae
assert read_video is zerowaste_vae.read_video and write_mp4 is zerowaste_vae.write_mp4
print([(w.category.__name__, w.filename) for w in caught if "engine.files" in str(w.message)])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[('DeprecationWarning', '<string>')]"


def test_readme_begins_for_users_of_comfyui():
    """The one sentence, how to install it, then which node to use when; all else comes later, and there is not much."""
    assert README.split("\n\n")[1].startswith("**In ComfyUI: replace VAE Decode by Zero-Waste VAE Decode. Done.**")
    titles = re.findall(r"^## (.+)$", README, re.M)
    assert titles[:3] == ["Install in ComfyUI", "First use", "Which node when"]
    text = README.partition("\n## What it gains")[0]
    assert "zerowaste-vae " not in text
    for named in ("custom_nodes", "| **Optimize** after Load VAE", "| **Loader** in the place of Load VAE", "`WANVAE`"):
        assert named in text
    assert README.count("\n") <= 200


def test_readme_answers_three_questions_first(tmp_path, monkeypatch, capsys):
    """Before all else; the command that it names prints what it says, for the card that it names."""
    screen = README.partition("\n## ")[0]
    rows = dict(re.findall(r"^\| (.+\?) \| (.+) \|$", screen, re.M))
    assert list(rows) == ["Does my model run?", "Does it fit my card?", "How long does it take?"]
    command, card = re.search(r"`python (\S+) fits`.*`(--card .+?)`", rows["Does it fit my card?"]).groups()
    assert f"python {command} info" in (ROOT / "docs" / "install.md").read_text("utf-8")
    monkeypatch.chdir(tmp_path)
    assert main(["fits", "wan2.1", "--size", "1280x720", *shlex.split(card)]) == 0
    assert main(["fits", "mochi", "--size", "848x480", *shlex.split(card)]) == 0
    said = capsys.readouterr().out
    assert "expected (computed)" in said and re.search(r"whole frames, [\d.]+ GB +[\d.]+ to [\d.]+ s$", said, re.M)
    assert "not timed" in said and 'says "not timed"' in rows["How long does it take?"]


def test_links_of_pages_lead_somewhere():
    for page, text in EVERY_PAGE.items():
        words = re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S)
        for target, place in re.findall(r"\]\(([^)#]+)(?:#([^)]+))?\)", words):
            if target.startswith("https://"):
                continue
            assert (page.parent / target).exists(), (page, target)
            if place:
                headings = re.findall(r"^#+ (.+)$", (page.parent / target).read_text(encoding="utf-8"), re.M)
                assert place in {re.sub(r"[^a-z0-9 -]", "", h.lower()).replace(" ", "-") for h in headings}, target


def test_the_film_is_short_and_small():
    place = ROOT / "docs" / "figures" / "compare.webp"
    with Image.open(place) as film:
        seconds = 0.0
        for number in range(film.n_frames):
            film.seek(number)
            film.load()
            seconds += film.info["duration"] / 1e3
        assert film.size[0] == 960 and film.n_frames > 20 and 15 < seconds < 25
    assert place.stat().st_size < 2 << 20
    assert "(figures/compare.webp)" in (ROOT / "docs" / "comfyui.md").read_text("utf-8")


def test_files_that_pages_name_are_there():
    place = re.compile(r"(?<![\w/.])((?:engine|nodes|tests|tools|locales|docs|assets)/[\w./-]+)")
    pages = {p: t for p, t in EVERY_PAGE.items() if p.parent.name != "log" and p.name != "CONTRIBUTING.md"}
    named = {(page.name, name.rstrip("./")) for page, text in pages.items() for name in place.findall(text)}
    assert len(named) > 30
    assert {(page, name) for page, name in named if not (ROOT / name).exists()} == set()


def test_the_changelog_alone_speaks_of_earlier_versions():
    """What was tried is in docs/log."""
    words = re.compile(r"\b(used to|no longer|any more|formerly|this release|the tree before"
                       r"|(an|the) (earlier|previous) (version|form|release|state)s?)\b")  # fmt: skip
    pages = {p: t for p, t in EVERY_PAGE.items() if p.name != "CHANGELOG.md" and p.parent.name != "log"}
    assert len(pages) > 40
    assert {p.name: found.group() for p, t in pages.items() if (found := words.search(" ".join(t.split())))} == {}


def test_every_page_is_reached_from_the_readme():
    linked = set(re.findall(r"\]\(docs/(\w[\w-]*\.md)", README))
    assert {page.name for page in PAGES if page.name != "README.md"} == linked


def test_readme_families():
    """Readme names every family with its sizes and type."""
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in re.findall(r"^\|.*\|$", README, re.M)]
    rows = {row[0]: row[1:] for row in rows if len(row) == 4 and row[3] in ("fp16", "bf16")}
    families = {a.published.title: a for a in ARCHITECTURES}
    # Rows stand for what the family is called after.
    known = {row: next(t for t in sorted(families, key=len) if t.startswith(row.partition(",")[0])) for row in rows}
    assert set(known.values()) == set(families) and len(known) == len(families)
    for title, (_, latent, native) in rows.items():
        architecture = families[known[title]]
        side, channels = architecture.spatial * architecture.side, architecture.published.config.latent_channels
        frames = "" if architecture.still else f" x {architecture.temporal}"
        assert latent.startswith(f"{channels * architecture.side**2}") and latent.endswith(f", {side}x{side}{frames}")
        assert native == architecture.native


@pytest.mark.parametrize("page", ["ZeroWasteVAELoader.md", "ZeroWasteVAELoader/zh.md"])
def test_the_loaders_help_names_every_family(page):
    text = (ROOT / "web" / "docs" / page).read_text("utf-8").lower()
    assert [a.name for a in ARCHITECTURES if not any(word in text for word in a.published.words)] == []


def test_node_models():
    """Nodes name the same models in both languages."""
    english, chinese = (json.loads((ROOT / "locales" / x / "nodeDefs.json").read_text("utf-8")) for x in ("en", "zh"))
    models = re.match("Loads VAEs of (.+?): ", english["ZeroWasteVAELoader"]["description"])[1]
    listed = {node: str(chinese[node]) for node, texts in english.items() if models in str(texts)}
    assert len(listed) == 4
    missing = {node: [m for m in re.split(", | and ", models) if m not in text] for node, text in listed.items()}
    assert not any(missing.values()), missing


def blocks(text):
    """Lines of a page's blocks of commands."""
    return [line for block in re.findall(r"^```\n(.*?)^```$", text, re.M | re.S) for line in block.splitlines()]


def options_of(parser):
    """Every option of a command and of its own commands."""
    nested = [sub for action in parser._actions if isinstance(action.choices, dict) for sub in action.choices.values()]
    return set(parser._option_string_actions).union(*map(options_of, nested))


def test_commands_of_pages_are_accepted():
    lines = [line for text in PAGES.values() for line in blocks(text) if line.startswith("zerowaste-vae ")]
    assert {line.split()[1] for line in lines} >= {"info", "encode", "decode", "demo", "plan", "bench"}
    for line in lines:
        _, *words = shlex.split(line)
        assert words[0] in COMMANDS
        assert callable(parser_of(words[0]).parse_args(words).run)


def test_readme_commands_run_from_top_to_bottom(tmp_path, monkeypatch, capsys, vae_file):
    """As they are written, in a folder with what they name."""
    lines = [line for line in blocks(README) if line.startswith("zerowaste-vae ")]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "seedvr2_vae.safetensors").write_bytes(vae_file.read_bytes())
    flux = random_checkpoint(WHOLE["flux"], 0, by_name("flux"))
    save_file(flux.tensors, "ae.safetensors", flux.metadata)
    write_mp4("clip.mp4", torch.rand(5, 16, 16, 3), 25)
    write_png("picture.png", torch.rand(16, 24, 3))
    monkeypatch.setattr("zerowaste_vae.engine.loader.demo_clip_path", lambda: tmp_path / "clip.mp4")
    assert len(lines) > 6
    for line in lines:
        _, *words = shlex.split(line)
        assert main(words) == 0, (line, capsys.readouterr().err)
    for name in ("result.mp4", "result.png", "seedvr2_vae.gguf", "demo_result"):
        assert (tmp_path / name).exists(), name


def test_options_of_pages_exist():
    known = set().union(*(options_of(parser_of(name)) for name in COMMANDS))
    others = ("comfyui.md", "install.md")  # which have those of ComfyUI, git and pip
    texts = [text for page, text in PAGES.items() if page.name not in others]
    options = set(re.findall(r"`(--[a-z-]+)", "".join(texts)))
    assert len(options) > 30
    assert options - known == set()


def test_readme_python_runs(tmp_path, monkeypatch, vae_file):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "seedvr2_vae.safetensors").write_bytes(vae_file.read_bytes())
    write_mp4("clip.mp4", torch.rand(5, 16, 16, 3), 25)
    write_latent("latent.safetensors", torch.zeros(1, 16, 1, 2, 2))
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    exec(compile(code, "README.md", "exec"), {})
    assert (tmp_path / "result.mp4").stat().st_size > 0


def fresh():
    spec = importlib.util.spec_from_file_location("fresh", ROOT / "tools" / "fresh.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_set_up_script_installs_once(tmp_path, monkeypatch):
    """The steps in order, for an environment without torch; afterwards none."""
    module, ran = fresh(), []

    def run(command, check):
        ran.append(command)
        if "venv" in command:
            for folder, name in (("bin", "python"), ("Scripts", "python.exe")):
                (tmp_path / "env" / folder).mkdir(parents=True)
                (tmp_path / "env" / folder / name).touch()

    monkeypatch.setattr(module.subprocess, "run", run)
    monkeypatch.setattr(module.subprocess, "call", lambda command, **_: int("import torch" in command))
    module.prepare(tmp_path / "env", plain=False)
    assert [command[-1] for command in ran] == [str(tmp_path / "env"), module.TORCH, f"{ROOT}[standalone,test]"]
    module.prepare(tmp_path / "env", plain=False)
    assert len(ran) == 3
    module.prepare(tmp_path / "env", plain=True)
    assert len(ran) == 5 and "--editable" not in ran[-1]


def test_fresh_pythons(monkeypatch, capsys):
    """Set up script knows the supported pythons."""
    module = fresh()
    monkeypatch.setattr(sys, "argv", ["fresh.py", "test"])
    monkeypatch.setattr(sys, "version_info", (3, 9, 1, "final", 0))
    assert module.main() == 2 and "Python 3.10" in capsys.readouterr().err
    assert PROJECT["project"]["requires-python"] == ">=3.10"


def test_readme_commands():
    """Readme names the commands of the set up script."""
    assert "python3 tools/fresh.py demo --out demo_out\n" in README
    assert "python3 tools/fresh.py test\n" in README
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert re.search(r'tools/fresh\.py --venv "\$work/venv" test$', ci, re.M) and "ruff" in ci


def test_any_folder_name(tmp_path):
    """The README's own is no name of Python's: pytest would import its __init__.py as a module of its own."""
    folder = tmp_path / "ComfyUI-ZeroWasteVAE"
    (folder / "tests").mkdir(parents=True)
    for name in ("__init__.py", "pyproject.toml", "tests/conftest.py", "tests/core.txt"):
        shutil.copy(ROOT / name, folder / name)
    (folder / "tests" / "test_one.py").write_text("def test_one(atol):\n    assert atol\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
