"""Writes the outputs of commands into the page that shows them."""

import difflib
import pathlib
from collections.abc import Sequence

from tests.documents import comparison
from tests.documents.running import Result

_SIMILAR = 0.6


def update(page: pathlib.Path, results: Sequence[Result]) -> list[str]:
    """Replaces outputs that differ from the page.

    Args:
      page: the page.
      results: what its commands did; those that failed or are as the page says are left alone.

    Returns:
      The commands whose output was replaced.
    """
    lines = page.read_text(encoding="utf-8").splitlines()
    changed = [result for result in results if result.problem and not result.code and result.step.expected]
    for result in reversed(changed):
        expected = result.step.expected or []
        new = [" " * result.block.indent + line for line in _like(expected, result.output)]
        lines[result.step.first : result.step.first + len(expected)] = new
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return [result.step.text for result in changed]


def _like(expected: Sequence[str], actual: Sequence[str]) -> list[str]:
    """Returns the output with the lines left out that the page leaves out: it shows those most similar to what it showed."""
    shown: list[str] = []
    place = 0
    for number, line in enumerate(expected):
        if line.strip() == comparison.DOTS:
            if shown[-1:] != [comparison.DOTS]:
                shown.append(comparison.DOTS)
            continue
        found = _most_similar(line, actual, place, is_last=number == len(expected) - 1)
        if found is None:
            continue
        if found > place and shown[-1:] != [comparison.DOTS]:
            shown.append(comparison.DOTS)
        shown.append(actual[found])
        place = found + 1
    if place < len(actual) and shown[-1:] != [comparison.DOTS]:
        shown.append(comparison.DOTS)
    return shown if set(shown) - {comparison.DOTS} else list(actual)


def _most_similar(line: str, actual: Sequence[str], start: int, is_last: bool) -> int | None:
    """Returns the number of the line that is most similar without its numbers, then with them, then the last of these."""
    if is_last and len(actual) > start:
        exact = [n for n in range(start, len(actual)) if comparison.same_line(line, actual[n])]
        start = len(actual) - 1 if not exact else exact[-1]
    ratios = [(_ratio(comparison.skeleton(line), comparison.skeleton(actual[n])), n) for n in range(start, len(actual))]
    best = max((ratio for ratio, _ in ratios), default=0.0)
    return max((_ratio(line, actual[n]), n) for ratio, n in ratios if ratio == best)[1] if best >= _SIMILAR else None


def _ratio(first: str, second: str) -> float:
    return difflib.SequenceMatcher(None, first, second).ratio()
