"""`completion`: print a script that completes commands and options in a shell."""

from __future__ import annotations

import argparse

from .parser import every

SHELLS = ("bash", "zsh", "powershell")
_HELP = """to use it now and in every new shell:
  bash        zerowaste-vae completion bash >> ~/.bashrc
  zsh         zerowaste-vae completion zsh >> ~/.zshrc
  PowerShell  zerowaste-vae completion powershell >> $PROFILE"""
#: Options are offered from the first hyphen on. Where nothing else is, shells complete files.
_BASH = """_zerowaste_vae() {{
    local line="${{COMP_WORDS[*]:1:$((COMP_CWORD - 1))}}" word="${{COMP_WORDS[COMP_CWORD]}}" words="" but="-*"
    case "$line " in
{cases}
    esac
    [[ $word == -* ]] && but=""
    COMPREPLY=($(compgen -W "$words" -X "$but" -- "$word"))
}}
complete -o default -F _zerowaste_vae zerowaste-vae
"""
_ZSH = """(( $+functions[compdef] )) || { autoload -U +X compinit && compinit; }
autoload -U +X bashcompinit && bashcompinit
"""
_POWERSHELL = """Register-ArgumentCompleter -Native -CommandName zerowaste-vae -ScriptBlock {{
    param($word, $tree, $place)
    $line = (($tree.CommandElements | Select-Object -Skip 1 | ForEach-Object {{ "$_" }}) -join ' ') + ' '
    $words = switch -Wildcard ($line) {{
{cases}
    }}
    $words | Where-Object {{ $_ -like "$word*" -and ($word -or $_ -notlike '-*') }} | ForEach-Object {{
        [System.Management.Automation.CompletionResult]::new($_, $_, 'ParameterValue', $_)
    }}
}}
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "completion", description="Print a script that completes commands and options of zerowaste-vae.",
        epilog=_HELP, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    print(script(args.shell), end="", file=args.stdout)
    return 0


def script(shell: str) -> str:
    """Return the script for one of SHELLS."""
    found = words()
    # Longer lines come first: a shell takes the first that fits.
    lines = sorted(found, key=lambda line: -len(line))
    if shell == "powershell":
        quoted = {line: ", ".join(f"'{word}'" for word in found[line]) for line in lines}
        cases = [f"        '{line} *' {{ {quoted[line]}; break }}" for line in lines if line]
        return _POWERSHELL.format(cases="\n".join([*cases, f"        default {{ {quoted['']} }}"]))
    cases = [f'    "{line} "*) words="{" ".join(found[line])}" ;;' for line in lines if line]
    bash = _BASH.format(cases="\n".join([*cases, f'    *) words="{" ".join(found[""])}" ;;']))
    return (_ZSH if shell == "zsh" else "") + bash


def words() -> dict[str, list[str]]:
    """Return for each command line, such as "bench decode", the words that may follow: commands and long options."""
    from . import parser_of

    top = parser_of("")
    out = {}
    for path, parser in [((), top), *every(top)]:
        shown = {name for action in parser._actions if action.help != argparse.SUPPRESS
                 for name in action.option_strings if name.startswith("--")}  # fmt: skip
        below = [name for action in parser._actions if isinstance(action, argparse._SubParsersAction)
                 for name in action.choices]  # fmt: skip
        out[" ".join(path)] = [*below, *sorted(shown)]
    return out
