"""The page of every flag, from what the commands say of themselves."""

import json
from collections.abc import Iterator
from typing import Any

from tfdist.__main__ import commands
from tfdist.cli.description import described
from tfdist.config import strategy_registry
from tfdist.config.topics import TOPICS, WITHOUT_EFFECT

_EVERY_COMMANDS = {
    "flagfile": "Read flags from a file, one per line; later flags win.",
    "config": "Read flags from a YAML file that maps their names to values; the command line and `--flagfile` win.",
    "help": "Show the help.",
}
_TYPES = {"string": "text", "int": "integer", "float": "number", "bool": "boolean"}
_HEAD = """\
---
search:
  boost: 2
---

# Flags

Every flag of every command, by topic. `tfdist help COMMAND` prints those of one command; a boolean flag is written `--name` or
`--noname`. [Commands](commands.md) describes flag files, YAML files and
completion; in the library, the same names are arguments.

"""


def text() -> str:
    """Returns the page."""
    return _HEAD + "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "## Every command\n"
    for name, about in _EVERY_COMMANDS.items():
        yield f"### `--{name}` {{ #{name} }}\n\n{about}\n"
    names: set[str] = set()
    for topic, flags in _by_topic().items():
        yield f"## {topic}\n"
        for flag, takers in flags:
            name = flag["name"]
            is_first = name not in names
            names.add(name)
            title, anchor = (f"`--{name}`", name) if is_first else (f"`--{name}` ({takers[0]})", f"{name}_{takers[0]}")
            yield f"### {title} {{ #{anchor} }}\n"
            yield f"{_facts(flag, takers)}\n"
            yield f"{_escaped(flag['help'])}\n"


def _by_topic() -> dict[str, list[tuple[dict[str, Any], list[str]]]]:
    """Returns flag and commands that take it, by topic; flags that are the same in several commands are one."""
    found: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for command in sorted(commands(), key=lambda name: name != "train"):  # whose flags most others share
        for flag in described(command)["flags"]:
            if flag["topic"] != WITHOUT_EFFECT:
                topic = f"Only for {command}" if flag["topic"] == "Flags" else flag["topic"]
                one = {**flag, "topic": topic}
                found.setdefault(json.dumps(one, sort_keys=True), (one, []))[1].append(command)
    order = {topic: place for place, topic in enumerate(TOPICS)}
    topics: dict[str, list[tuple[dict[str, Any], list[str]]]] = {}
    for flag, takers in sorted(found.values(), key=lambda pair: order.get(pair[0]["topic"], len(order))):
        topics.setdefault(flag["topic"], []).append((flag, takers))
    return topics


def _facts(flag: dict[str, Any], takers: list[str]) -> str:
    """Returns a line with type, default, commands and strategies."""
    kind = " or ".join(f"`{choice}`" for choice in flag["choices"]) or _TYPES[flag["type"]]
    default = {None: "none", "": "empty", False: "`false`", True: "`true`"}.get(flag["default"], f"`{flag['default']}`")
    facts = [kind, f"default: {default}", f"commands: {', '.join(takers)}"]
    if strategies := strategy_registry.taking(flag["name"]):
        facts.append(f"strategies: {', '.join(strategies)}")
    return " · ".join(facts) + "\n{ .facts }"


def _escaped(help_text: str) -> str:
    """Returns a help text in which nothing is taken for Markdown or HTML."""
    for character in "\\*_[]<>|":
        help_text = help_text.replace(
            character, f"\\{character}" if character not in "<>" else {"<": "&lt;", ">": "&gt;"}[character]
        )
    return help_text
