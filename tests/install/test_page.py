"""Sections of docs/install.md, and what follows them."""

from pathlib import Path

from .page import PAGE, TITLES, Section

HERE = Path(__file__).parent
#: Section -> the tests that run its commands, or why none does.
FOLLOWED = {
    "ComfyUI Manager, or the registry": "they fetch the pack from the registry, which has no release yet",
    "git": "test_in_comfyui.py",
    "Windows portable": "test_in_comfyui.py",
    "ComfyUI Desktop": "it has no Linux version; its commands are those of git",
    "The command inside ComfyUI": "test_in_comfyui.py",
    "Stand-alone": "test_alone.py",
    "pip, into a Python of yours": "test_alone.py",
    "What else is left on the disk": "it has no commands",
}


def test_every_section_is_followed_or_it_is_said_why():
    assert list(FOLLOWED) == TITLES
    for title, file in FOLLOWED.items():
        if file.endswith(".py"):
            assert f'Section("{title}")' in (HERE / file).read_text("utf-8") and Section(title).left, title
        else:
            assert all(line.startswith("comfy node ") for line in Section(title).left), title


def test_the_readme_has_the_same_commands():
    readme = (PAGE.parents[1] / "README.md").read_text("utf-8")
    assert f"```\n{Section('git').take(3)}\n```" in readme
    portable = Section("Windows portable").left[1].split()[0]
    assert f"Windows portable version it is `{portable}`" in readme
