"""The commands and programs that a page of the documentation shows, and what they print there.

A comment before a block, which the site does not show, says what a test cannot know:

    <!-- not run: why -->        the block is not run
    <!-- any numbers: why -->    its numbers depend on the machine, or on the moment
    <!-- first: command -->      a command that makes what the block needs, such as a run
"""

import pathlib
import re
from collections.abc import Iterator
from typing import NamedTuple

_FENCE = re.compile(r"( *)```(console|bash|python)\b(.*)")
_COMMENT = re.compile(r" *<!-- (not run|any numbers|first): (.+) -->")
_TITLE = re.compile(r'title="([^"]+)"')


class Step(NamedTuple):
    """A command, or a program, and its output."""

    text: str  # the command, or the source of the program
    expected: list[str] | None  # the lines of output that the page shows; None if it shows no output


class Block(NamedTuple):
    """A block of code."""

    kind: str  # "console", "bash" or "python"
    title: str  # the file that a program is written to, to be used by later commands; "" if the program is run
    not_run: str  # why it is not run; "" if it is
    any_numbers: str  # why its numbers do not count; "" if they do
    first: list[str]  # commands to run before it
    line: int  # number of its first line in the page, from 1
    steps: list[Step]


def read(page: pathlib.Path) -> list[Block]:
    """Returns the blocks of a page."""
    lines = page.read_text(encoding="utf-8").splitlines()
    found: list[Block] = []
    comments: dict[str, list[str]] = {}
    number = 0
    while number < len(lines):
        line = lines[number]
        if comment := _COMMENT.fullmatch(line):
            comments.setdefault(comment[1], []).append(comment[2])
        elif fence := _FENCE.fullmatch(line):
            end = next(n for n in range(number + 1, len(lines)) if lines[n].strip() == "```")
            indent, kind, title = len(fence[1]), fence[2], _TITLE.search(fence[3])
            body = [text[indent:] for text in lines[number + 1 : end]]
            steps = list(_STEPS[kind](body))
            why_not, any_numbers = (" ".join(comments.get(name, ())) for name in ("not run", "any numbers"))
            first = comments.get("first", [])
            found.append(Block(kind, title[1] if title else "", why_not, any_numbers, first, number + 1, steps))
            comments, number = {}, end
        elif line.strip():
            comments = {}
        number += 1
    return found


def _console(body: list[str]) -> Iterator[Step]:
    """Splits a session: a command follows `$ `, its further lines follow a backslash, and its output comes next."""
    command, output = "", list[str]()
    for line in body:
        if command.endswith("\\") and not output:
            command += f"\n{line}"
        elif line.startswith("$ "):
            if command:
                yield Step(command, output)
            command, output = line.removeprefix("$ "), []
        elif command:
            output.append(line)
    if command:
        yield Step(command, output)


def _bash(body: list[str]) -> Iterator[Step]:
    """Makes each command of a script, with its continued lines, a step."""
    command = ""
    for line in body:
        command = f"{command}\n{line}" if command else line
        if not command.endswith("\\"):
            if command.strip() and not command.lstrip().startswith("#"):
                yield Step(command, None)
            command = ""


def _python(body: list[str]) -> Iterator[Step]:
    yield Step("\n".join(body) + "\n", None)


_STEPS = {"console": _console, "bash": _bash, "python": _python}
