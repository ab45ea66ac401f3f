"""Whether a command prints what a page shows.

Lines must be equal, apart from spaces. `...` stands for any lines or, within a line, for any text. Integers must be
equal, other numbers about equal; times, rates, shares and dates may be any.
"""

import re
from collections.abc import Sequence

DOTS = "..."
_NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?")
_ANY = (
    re.compile(r"\d{4}-\d\d-\d\d"),
    re.compile(r"\d{8}-\d{6}"),
    re.compile(r"\b\d?\d:\d\d(?::\d\d)?\b"),
    re.compile(r"\d+(?:\.\d+)?(?:e[-+]?\d+)? ?(?:s|ms|us|min|h|%|s/step|ms/step|examples/s|MB/s|GB/s)(?![\w/])"),
)
_ABSOLUTE, _RELATIVE = 0.03, 0.3  # the processor and the number of threads change the order of sums
_TINY = 1e-4  # a rounding error, whose value means nothing


def same(expected: Sequence[str], actual: Sequence[str], any_numbers: bool = False) -> bool:
    """Returns whether the output is what is expected."""
    places = _with_skipped_dots(expected, {0})  # how many expected lines may have been seen, for all ways to read `...`
    for line in actual:
        after = set()
        for place in places - {len(expected)}:
            if expected[place].strip() == DOTS:
                after.add(place)
            elif same_line(expected[place], line, any_numbers):
                after.add(place + 1)
        places = _with_skipped_dots(expected, after)
    return len(expected) in places


def _with_skipped_dots(expected: Sequence[str], places: set[int]) -> set[int]:
    found = set(places)
    for place in sorted(places):
        while place < len(expected) and expected[place].strip() == DOTS:
            place += 1
            found.add(place)
    return found


def same_line(expected: str, actual: str, any_numbers: bool = False) -> bool:
    """Returns whether one line is what is expected."""
    wanted, got = _plain(expected), _plain(actual)
    if DOTS in wanted:
        parts = [_words(part) for part in wanted.split(DOTS)]
        pattern = ".*".join(_NUMBER.pattern.join(map(re.escape, part)) for part in parts)
        return re.fullmatch(pattern, got) is not None
    if _words(wanted) != _words(got):
        return False
    pairs = zip(_NUMBER.findall(wanted), _NUMBER.findall(got), strict=True)
    return any_numbers or all(_close(first, second) for first, second in pairs)


def _plain(line: str) -> str:
    for pattern in _ANY:
        line = pattern.sub("ANY", line)
    return " ".join(line.split())


def _words(line: str) -> list[str]:
    return _NUMBER.split(line)


def _close(first: str, second: str) -> bool:
    a, b = (float(text.replace(",", "")) for text in (first, second))
    if not re.search("[.e]", first + second):
        return a == b
    absolute = _TINY if "e" in first + second else _ABSOLUTE
    return max(a, b) <= absolute or abs(a - b) <= max(absolute, _RELATIVE * max(a, b))
