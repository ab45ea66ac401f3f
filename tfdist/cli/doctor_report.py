"""Sections of a report: facts for programs, and findings for users."""

import enum
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple


class Status(enum.StrEnum):
    """The meaning of a finding."""

    OK = "ok"
    WARNING = "warning"  # works, but may fail later or elsewhere
    MISSING = "missing"  # not installed
    FAILED = "failed"  # installed, and does not work


class Finding(NamedTuple):
    """A line of the report.

    Attributes:
      status: meaning of the finding.
      text: one line.
      remedy: a command or instruction that fixes a problem; may be empty.
    """

    status: Status
    text: str
    remedy: str = ""


class Section(NamedTuple):
    """A part of the report.

    Attributes:
      name: key of the facts.
      facts: JSON values, with units in the names.
      findings: interpretation of the facts.
    """

    name: str
    facts: Mapping[str, Any]
    findings: list[Finding]


def lines(finding: Finding) -> Iterator[str]:
    """Yields the lines of a finding."""
    yield f"  {finding.status:<8} {finding.text}"
    if finding.remedy:
        yield f"           -> {finding.remedy}"


def warning_or_ok(problem: str, remedy: str, otherwise: str) -> Finding:
    """Returns a warning if there is a problem, else an OK."""
    return Finding(Status.WARNING, problem, remedy) if problem else Finding(Status.OK, otherwise)
