"""Parses Slurm's compressed lists: host lists such as `gpu[01-03,07],login1`, and task counts such as `4(x2),3`."""

import itertools
import re

from tfdist.errors import InputError

_MAX_HOSTS = 65536  # limits the memory used for typing errors such as [1-1000000000]
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\],\s]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand(text: str) -> list[str]:
    """Expands a host list, preserving order and leading zeros: `gpu[09-10],login1` is gpu09, gpu10, login1.

    Args:
      text: comma-separated names, each with any number of bracketed lists of numbers and ranges.

    Returns:
      The host names; the last bracket of a name varies fastest.

    Raises:
      InputError: the text is no host list.
    """
    hosts: list[str] = []
    for name in _split(text):
        parts = [_numbers(text, match[1]) if match[2] is None else [match[2]] for match in _PART.finditer(name)]
        if _PART.sub("", name) or not parts:
            raise _error(text, f"{name!r} is not a name with brackets closed")
        hosts += itertools.islice(map("".join, itertools.product(*parts)), _MAX_HOSTS + 1)
        if len(hosts) > _MAX_HOSTS:
            raise _error(text, f"it names more than {_MAX_HOSTS} hosts")
    return hosts


def counts(text: str) -> list[int]:
    """Expands a list of counts: `4(x2),3` is 4, 4, 3.

    Raises:
      InputError: the text is no list of counts.
    """
    found = [_COUNT.fullmatch(part) for part in text.split(",")]
    if not all(found):
        raise InputError(f"A list of task counts must read like 4(x2),3. Received: {text!r}.")
    repeats = [(int(match[1]), int(match[2] or 1)) for match in found if match]
    return [count for count, times in repeats for _ in range(min(times, _MAX_HOSTS))]


def _split(text: str) -> list[str]:
    """Splits at commas outside brackets."""
    return re.split(r",(?![^\[]*\])", text.strip())


def _numbers(text: str, inside: str) -> list[str]:
    numbers: list[str] = []
    for item in inside.split(","):
        match = _RANGE.fullmatch(item)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise _error(text, f"{item!r} is neither a number nor an increasing range")
        first, last = int(match[1]), int(match[2] or match[1])
        if last - first >= _MAX_HOSTS:
            raise _error(text, f"it names more than {_MAX_HOSTS} hosts")
        numbers += [str(number).zfill(len(match[1])) for number in range(first, last + 1)]
    return numbers


def _error(text: str, why: str) -> InputError:
    return InputError(f"A host list must read like gpu[01-03,07],login1: {why}. Received: {text!r}.")
