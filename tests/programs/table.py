"""The table of docs/reference/programs.md: program by strategy."""

import ast
import collections
import datetime
import pathlib
from collections.abc import Mapping, Sequence

from tests.programs.catalog import HERE, programs

DOCUMENT = HERE.parents[1] / "docs" / "reference" / "programs.md"
_BEGIN, _END = "<!-- table -->\n", "<!-- end of table -->\n"


def write(verdicts: Mapping[str, Mapping[str, str]], strategies: Sequence[str], day: datetime.date) -> None:
    """Writes these verdicts into the document's table; those of other programs and strategies are kept."""
    before, _, rest = DOCUMENT.read_text().partition(_BEGIN)
    table, _, after = rest.partition(_END)
    known = _read(table, strategies)
    merged = {path: known.get(path, {}) | dict(verdicts.get(path, {})) for path in programs()}
    DOCUMENT.write_text(before + _BEGIN + rendered(merged, strategies, day) + _END + after)


def _read(table: str, strategies: Sequence[str]) -> dict[str, dict[str, str]]:
    rows = [
        [cell.strip() for cell in line.strip("|\n ").split(" | ")]
        for line in table.splitlines()
        if line.startswith("| `")
    ]
    return {
        row[0].strip("`"): {
            name: cell for name, cell in zip(strategies, row[-len(strategies) :], strict=True) if cell != "-"
        }
        for row in rows
    }


def rendered(verdicts: Mapping[str, Mapping[str, str]], strategies: Sequence[str], day: datetime.date) -> str:
    counts = collections.Counter(_short(found) for row in verdicts.values() for found in row.values())
    total = ", ".join(f"{count} {word}" for word, count in counts.most_common())
    lines = [
        f"{day}: {len(verdicts)} programs, {sum(counts.values())} runs on replicas: {total}.",
        "",
        f"| program | description | {' | '.join(strategies)} |",
        f"| --- | --- |{' --- |' * len(strategies)}",
    ]
    for path, row in verdicts.items():
        cells = " | ".join(_short(row[strategy]) if strategy in row else "-" for strategy in strategies)
        lines.append(f"| `{path}` | {_about(HERE / path)} | {cells} |")
    refused = [(path, program.refused) for path, program in programs().items() if program.refused and path in verdicts]
    lines += [
        "",
        "Programs that are refused, with a part of the message, or equal in distribution only, with the reason:",
        "",
    ]
    lines += [f"- `{path}`: {part}" for path, part in refused]
    reasons = {path: program.distribution for path, program in programs().items() if program.distribution}
    lines += [f"- `{path}` (distribution): {reason}." for path, reason in reasons.items()]
    return "\n".join(lines) + "\n"


def _short(verdict: str) -> str:
    return verdict.partition(":")[0]


def _about(path: pathlib.Path) -> str:
    found = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(found.split()).rstrip(".")
