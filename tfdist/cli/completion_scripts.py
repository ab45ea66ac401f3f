"""Scripts for completion in shells, generated from descriptions of the commands."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

# Suffixes of the names of flags whose values are paths.
_FILES = ("_file", "flagfile", "config", "output", "hosts", "resume")
_DIRECTORIES = "_dir"


class Flag(NamedTuple):
    """A flag.

    Attributes:
      name: its name.
      help: its description.
      boolean: whether its syntax is `--name` or `--noname`.
      values: values to suggest.
    """

    name: str
    help: str
    boolean: bool
    values: Sequence[str]


class Command(NamedTuple):
    """A command.

    Attributes:
      name: its name.
      about: its description.
      words: words, one of which follows the name.
      arguments: arguments after the flags, such as "RUN" or "bash|zsh"; may be empty.
      flags: its flags.
    """

    name: str
    about: str
    words: Sequence[str]
    arguments: str
    flags: Sequence[Flag]


_COMMON_FLAGS = (
    Flag("flagfile", "Read flags from a file.", False, ()),
    Flag("config", "Read flags from a YAML file.", False, ()),
    Flag("help", "Show the help.", True, ()),
)

_BASH = """\
# Completion of tfdist in bash. Load it by: source <(tfdist completion bash)
_tfdist() {
    local cur="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD - 1]}" first=0 end=0 i
    local command flag="" prefix="" words="" flags="" no="" arguments="" values=""
    COMPREPLY=()
    for ((i = 1; i < COMP_CWORD; i++)); do  # what follows -- is a command of its own, often another one of tfdist
        if [[ "${COMP_WORDS[i]}" == -- ]]; then
            end=$i
            if [[ "${COMP_WORDS[i + 1]##*/}" == tfdist && $((i + 1)) -lt $COMP_CWORD ]]; then first=$((i + 1)) end=0; fi
        fi
    done
    if ((end)); then
        if ((COMP_CWORD == end + 1)); then mapfile -t COMPREPLY < <(compgen -c -- "$cur"); fi
        return
    fi
    if ((COMP_CWORD == first + 1)); then
        mapfile -t COMPREPLY < <(compgen -W "@COMMANDS@ help --help --version" -- "$cur")
        return
    fi
    command="${COMP_WORDS[first + 1]}"
    case "$command" in
        help) words="@COMMANDS@" ;;
@CASES@
    esac
    if [[ -n "$words" && "$cur" != -* && $COMP_CWORD -eq $((first + 2)) ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$words" -- "$cur")
        return
    fi
    if [[ "$cur" == = ]]; then  # bash splits words at =
        flag="$previous" cur=""
    elif [[ "$previous" == = ]]; then
        flag="${COMP_WORDS[COMP_CWORD - 2]}"
    elif [[ "$cur" == --*=* ]]; then
        flag="${cur%%=*}" prefix="${cur%%=*}=" cur="${cur#*=}"
    elif [[ " $flags " == *" $previous= "* ]]; then
        flag="$previous"
    fi
    if [[ -n "$flag" ]]; then
        case "$command$flag" in
@VALUES@
            *_dir) compopt -o filenames 2>/dev/null; mapfile -t COMPREPLY < <(compgen -d -- "$cur") ;;
            @FILES@) compopt -o filenames 2>/dev/null; mapfile -t COMPREPLY < <(compgen -f -- "$cur") ;;
        esac
        if [[ -n "$values" ]]; then mapfile -t COMPREPLY < <(compgen -P "$prefix" -W "$values" -- "$cur"); fi
        return
    fi
    if [[ "$cur" != -* && -n "$arguments" ]]; then return; fi  # completed as a path
    if [[ "$cur" == --no* ]]; then flags="$flags $no"; fi
    mapfile -t COMPREPLY < <(compgen -W "$flags" -- "$cur")
    if [[ ${#COMPREPLY[@]} -eq 1 && "${COMPREPLY[0]}" == *= ]]; then compopt -o nospace 2>/dev/null; fi
}
complete -o bashdefault -o default -F _tfdist tfdist
"""

_ZSH = """\
#compdef tfdist
# Completion of tfdist in zsh. Load it by: source <(tfdist completion zsh)
_tfdist() {
    local -a commands=(
@COMMANDS@
    )
    if ((CURRENT == 2)); then
        if [[ "$PREFIX" == -* ]]; then compadd -- --help --version; else _describe -t commands 'command of tfdist' commands; fi
        return
    fi
    local command="$words[2]"
    shift words
    ((CURRENT--))
    case "$command" in
        help) _describe -t commands 'command of tfdist' commands ;;
@CASES@
        *) _files ;;
    esac
}
if [[ "$funcstack[1]" == _tfdist ]]; then _tfdist "$@"; else compdef _tfdist tfdist; fi
"""


def bash(commands: Sequence[Command]) -> str:
    """Returns the script for bash, which splits words at "=" and completes values without their flag."""
    cases, flags_by_values = [], dict[str, list[str]]()
    for command in commands:
        flags = [*command.flags, *(_COMMON_FLAGS if command.flags else _COMMON_FLAGS[-1:])]
        flag_words = " ".join(f"--{flag.name}{'' if flag.boolean else '='}" for flag in flags)
        negated_flags = " ".join(f"--no{flag.name}" for flag in command.flags if flag.boolean)
        words = " ".join([*command.words, *_alternatives(command)])
        arguments = "" if command.arguments.startswith("--") else command.arguments
        cases.append(
            f'{command.name}) words="{words}" arguments="{arguments}" '
            f'flags="{flag_words}{" --" * command.arguments.startswith("--")}" no="{negated_flags}" ;;'
        )
        for flag in flags:
            if flag.values:
                flags_by_values.setdefault(" ".join(flag.values), []).append(f"{command.name}--{flag.name}")
    values = [f'{" | ".join(flag_names)}) values="{text}" ;;' for text, flag_names in flags_by_values.items()]
    return _fill(
        _BASH,
        COMMANDS=" ".join(command.name for command in commands),
        CASES=_indent(cases, 8),
        VALUES=_indent(values, 12),
        FILES=" | ".join(f"*{'' if name.startswith('_') else '--'}{name}" for name in _FILES),
    )


def zsh(commands: Sequence[Command]) -> str:
    """Returns the script for zsh, which shows the first sentence of each description."""
    cases = []
    for command in commands:
        flags = [*command.flags, *(_COMMON_FLAGS if command.flags else _COMMON_FLAGS[-1:])]
        specs = [spec for flag in flags for spec in _zsh_flag(flag)] + [
            _quote(spec) for spec in _zsh_arguments(command)
        ]
        lines = [
            f"{command.name})",
            "    _arguments -S \\",
            *(f"        {spec} \\" for spec in specs[:-1]),
            f"        {specs[-1]}",
        ]
        cases += [*lines, "    ;;"]
    command_lines = [
        *(_quote(f"{command.name}:{_sentence(command.about)}") for command in commands),
        "'help:Describe a command and its flags'",
    ]
    return _fill(_ZSH, COMMANDS=_indent(command_lines, 8), CASES=_indent(cases, 8))


SHELLS: Mapping[str, Callable[[Sequence[Command]], str]] = {"bash": bash, "zsh": zsh}


def _alternatives(command: Command) -> list[str]:
    return command.arguments.split("|") if "|" in command.arguments else []


def _zsh_flag(flag: Flag) -> list[str]:
    text = _sentence(flag.help).replace("\\", "\\\\").replace("[", r"\[").replace("]", r"\]")
    if flag.boolean:
        return [_quote(f"--{flag.name}[{text}]")]
    if flag.values:
        action = f"({' '.join(flag.values)})"
    elif flag.name.endswith(_DIRECTORIES):
        action = "_files -/"
    else:
        action = "_files" if flag.name.endswith(_FILES) else " "
    return [_quote(f"--{flag.name}=[{text}]:{flag.name.replace('_', ' ')}:{action}")]


def _zsh_arguments(command: Command) -> list[str]:
    first = [f"1:name:({' '.join(command.words)})"] if command.words else []
    if command.arguments.startswith("--"):
        return [*first, "*::command:_normal"]
    if _alternatives(command):
        return [f"1:name:({' '.join(_alternatives(command))})"]
    return [*first, *(["*:path:_files"] if command.arguments else [])]


def _sentence(text: str) -> str:
    """Returns the first sentence of a description, without its end."""
    return " ".join(text.split()).partition(". ")[0].rstrip(".")


def _quote(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _indent(lines: Iterable[str], width: int) -> str:
    return "\n".join(" " * width + line for line in lines)


def _fill(script: str, **parts: str) -> str:
    for name, text in parts.items():
        script = script.replace(f"@{name}@", text)
    return script
