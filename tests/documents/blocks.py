"""The commands and programs that a page of the documentation shows, and what they print there.

A comment before a block, which the site does not show, says what a test cannot know:

    <!-- not run: why -->        the block is not run
    <!-- any numbers: why -->    its numbers depend on the machine, or on the moment
    <!-- first: command -->      a command that makes what the block needs, such as a run
"""

import dataclasses
import pathlib
import re
from collections.abc import Iterator

_FENCE = re.compile(r"( *)```(console|bash|python)\b(.*)")
_COMMENT = re.compile(r" *<!-- (not run|any numbers|first): (.+) -->")
_TITLE = re.compile(r'title="([^"]+)"')


@dataclasses.dataclass
class Step:
    """A command, or a program, and its output.

    Attributes:
      text: the command, or the source of the program.
      expected: the lines of output that the page shows; None if it shows no output, only a command or program.
      first: number of the first of these lines in the page, from 0.
    """

    text: str
    expected: list[str] | None
    first: int


@dataclasses.dataclass
class Block:
    """A block of code.

    Attributes:
      kind: "console", "bash" or "python".
      title: the file that a program is written to, to be used by later commands; "" if the program is run.
      not_run: why it is not run; "" if it is.
      any_numbers: why its numbers do not count; "" if they do.
      first: commands to run before it.
      indent: the spaces before each line.
      line: number of its first line in the page, from 1.
      steps: what is run.
    """

    kind: str
    title: str
    not_run: str
    any_numbers: str
    first: list[str]
    indent: int
    line: int
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
            steps = list(_STEPS[kind](body, number + 1))
            why_not, any_numbers = (" ".join(comments.get(name, ())) for name in ("not run", "any numbers"))
            of_block = (why_not, any_numbers, comments.get("first", []), indent, number + 1, steps)
            found.append(Block(kind, title[1] if title else "", *of_block))
            comments, number = {}, end
        elif line.strip():
            comments = {}
        number += 1
    return found


def _console(body: list[str], start: int) -> Iterator[Step]:
    """Splits a session: a command follows `$ `, its further lines follow a backslash, and its output comes next."""
    step: Step | None = None
    for number, line in enumerate(body, start):
        if step and step.text.endswith("\\") and step.expected == []:
            step.text, step.first = f"{step.text}\n{line}", number + 1
        elif line.startswith("$ "):
            if step:
                yield step
            step = Step(line.removeprefix("$ "), [], number + 1)
        elif step and step.expected is not None:
            step.expected.append(line)
    if step:
        yield step


def _bash(body: list[str], start: int) -> Iterator[Step]:
    """Makes each command of a script, with its continued lines, a step."""
    command = ""
    for line in body:
        command = f"{command}\n{line}" if command else line
        if not command.endswith("\\"):
            if command.strip() and not command.lstrip().startswith("#"):
                yield Step(command, None, start)
            command = ""


def _python(body: list[str], start: int) -> Iterator[Step]:
    yield Step("\n".join(body) + "\n", None, start)


_STEPS = {"console": _console, "bash": _bash, "python": _python}
