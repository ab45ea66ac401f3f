"""The pages of the flags, from what the commands say of themselves: an index of all flags, and a page for each group."""

import functools
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from tfdist.__main__ import commands
from tfdist.cli import command
from tfdist.cli.command import COMMON_FLAGS
from tfdist.config import strategy_registry
from tfdist.config.fields import NO_EFFECT_HELP, TOPICS

_TYPES = {"string": "text", "int": "integer", "float": "number", "bool": "boolean"}
_INDEX = """\
# Flags

Every flag of every command, in a line each; the name leads to its default, its commands and the details. `tfdist help COMMAND`
prints the flags of one command; a boolean flag is written `--name` or `--noname`. [Commands](commands.md) describes flag files,
YAML files; in the library, the same names are arguments.
"""
_BOOST = "---\nsearch:\n  boost: 2\n---\n\n"


class _Entry(NamedTuple):
    """A flag that is the same in several commands; in all of them, if there are none."""

    flag: dict[str, Any]
    commands: list[str]

    @property
    def page(self) -> str:
        """The title of its page: its group in `--help`, or the only command that has the group."""
        if self.flag["topic"] in TOPICS:
            return str(self.flag["topic"])
        return f"tfdist {self.commands[0]}" if len(self.commands) == 1 else "Several commands"


def pages() -> Iterator[tuple[str, str]]:
    """Yields path in the site and Markdown of each page, the index first."""
    lines, texts = [_INDEX], {}
    for title, page in itertools.groupby(_entries().items(), lambda item: item[1].page):
        entries, path = dict(page), _path(title)
        lines += [f"\n## [{title}]({path})\n", *(_line(path, anchor, entry) for anchor, entry in entries.items())]
        texts[f"reference/{path}"] = "\n".join([f"{_BOOST}# {title}\n", *_sections(entries)])
    yield "reference/flags.md", "\n".join(lines)
    yield from texts.items()


def link(name: str) -> str:
    """Returns where a flag is described, as seen from the index."""
    return f"{_path(_entries()[name].page)}#{name}"


def _flags_of(command_name: str) -> list[dict[str, Any]]:
    """Returns the flags of a command with an effect, as it describes them."""
    asked = [sys.executable, "-m", f"tfdist.{command_name}", "--helpjson"]
    described = json.loads(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)
    return [flag for flag in described["flags"] if flag["topic"] != NO_EFFECT_HELP]


@functools.cache
def _entries() -> dict[str, _Entry]:
    """Returns the flags by their anchors, in the order of pages and topics."""
    entries: dict[str, _Entry] = {}
    for name in sorted(commands(), key=lambda name: name != "train"):  # whose flags most others share
        for flag in _flags_of(name):
            entries.setdefault(json.dumps(flag, sort_keys=True), _Entry(flag, [])).commands.append(name)
    for name, about in {**command.FILES, **command.HELP_LINE}.items():
        entries[name] = _Entry({"name": name.removeprefix("--"), "help": about, "topic": COMMON_FLAGS}, [])
    order = {topic: place for place, topic in enumerate(TOPICS)}
    anchors: dict[str, _Entry] = {}
    for entry in sorted(entries.values(), key=lambda entry: (order.get(entry.page, len(order)), entry.page)):
        name = entry.flag["name"]
        anchors[f"{name}_{entry.commands[0]}" if name in anchors else name] = entry
    return anchors


def _path(title: str) -> str:
    return f"flags/{title.lower().replace(' ', '_')}.md"


def _line(path: str, anchor: str, entry: _Entry) -> str:
    about = re.split(r"(?<=\.) ", entry.flag["help"])[0]
    return f"- [{_name(anchor, entry)}]({path}#{anchor}){{ #{anchor} }}: {_escaped(about)}"


def _name(anchor: str, entry: _Entry) -> str:
    """Returns a flag's name, with a command if there is another flag of this name."""
    name = entry.flag["name"]
    return f"`--{name}`" if anchor == name else f"`--{name}` ({entry.commands[0]})"


def _sections(entries: dict[str, _Entry]) -> Iterator[str]:
    """Yields the flags of a page, below their topics if there are several."""
    topics = {entry.flag["topic"] for entry in entries.values()}
    for topic, section in itertools.groupby(entries.items(), lambda item: item[1].flag["topic"]):
        if len(topics) > 1:
            yield f"## {topic}\n"
        for anchor, entry in section:
            yield f"##{'#' * (len(topics) > 1)} {_name(anchor, entry)} {{ #{anchor} }}\n"
            yield from [_facts(*entry)] if entry.commands else []
            yield f"{_escaped(entry.flag['help'])}\n"


def _facts(flag: dict[str, Any], takers: list[str]) -> str:
    """Returns a line with type, default, commands and strategies."""
    kind = " or ".join(f"`{choice}`" for choice in flag["choices"]) or _TYPES[flag["type"]]
    default = {None: "none", "": "empty", False: "`false`", True: "`true`"}.get(flag["default"], f"`{flag['default']}`")
    facts = [kind, f"default: {default}", f"commands: {', '.join(takers)}"]
    if strategies := strategy_registry.strategies_with(flag["name"]):
        facts.append(f"strategies: {', '.join(strategies)}")
    return " · ".join(facts) + "\n{ .facts }\n"


def _escaped(help_text: str) -> str:
    """Returns a help text in which nothing is taken for Markdown or HTML."""
    return re.sub(r"[\\*_\[\]<>|]", lambda found: f"&#{ord(found[0])};", help_text)
