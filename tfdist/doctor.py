"""Report the state of this machine, and test each engine in separate processes.

The exit code is 0 if all installed components work, and 1 if one of them fails.
"""

import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from absl import flags

from tfdist.cli import command, doctor_engines, doctor_machine
from tfdist.cli.doctor_engines import ModuleRunner
from tfdist.cli.doctor_machine import Finding, Status
from tfdist.cli.output import Output
from tfdist.config.fields import parse_known_names
from tfdist.config.strategy_registry import NAMES
from tfdist.errors import ExitCode, InputError

_TITLES = {
    "versions": "Versions",
    "machine": "Machine",
    "limits": "Limits",
    "environment": "Launcher and relevant environment variables",
    "network": "Network",
    "frameworks": "TensorFlow and Horovod",
    "engines": "Engines: two training steps, compared with one device",
}


class _Report:
    def __init__(self, output: Output):
        self._output = output
        self._findings: list[dict[str, str | None]] = []

    def add(self, section: str, findings: Iterable[Finding]) -> None:
        """Prints a section, and each finding as soon as it is available."""
        self._output.line(("\n" if self._findings else "") + _TITLES[section])
        for finding in findings:
            for line in finding.lines():
                self._output.line(line)
            text = " ".join(finding.text.split())
            self._findings.append(
                {"section": section, "status": str(finding.status), "text": text, "remedy": finding.remedy or None}
            )

    def end(self, engines: list[dict[str, Any]]) -> int:
        """Prints the summary; returns the exit code."""
        counts = {status: sum(finding["status"] == status for finding in self._findings) for status in Status}
        failure_count = counts[Status.FAILED]
        summary = f"{failure_count} failed" if failure_count else "Everything installed works"
        summary += f"; {counts[Status.MISSING]} missing, {counts[Status.WARNING]} warnings."
        self._output.line(f"\n{summary}")
        self._output.result({"works": not failure_count, "findings": self._findings, "engines": engines})
        return ExitCode.FAILED if failure_count else ExitCode.DONE


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of this command."""
    help_text = f"Comma-separated strategies to test: {', '.join(NAMES)}. Defaults to all."
    flags.DEFINE_string("only", "", help_text, flag_values=values)
    flags.DEFINE_bool("quick", False, "Do not test the engines.", flag_values=values)
    help_text = "Seconds after which a smoke test of an engine, or an import, is stopped and counts as failed."
    flags.DEFINE_float("deadline_seconds", 60.0, help_text, flag_values=values)


def main(values: flags.FlagValues, output: Output) -> int:
    """Prints the report; returns the exit code."""
    names, seconds = parse_known_names(values.only, NAMES, "a strategy") or NAMES, values.deadline_seconds
    if not seconds > 0:
        raise InputError(f"--deadline_seconds must be positive. Received: {seconds:g}.")
    report = _Report(output)
    engines: list[dict[str, Any]] = []
    with ModuleRunner() as runner:

        def engine_findings() -> Iterator[Finding]:
            for result in doctor_engines.run_smoke_tests(runner, frameworks, names, seconds):
                engines.append(result.to_json())
                yield result.finding()

        report.add("versions", doctor_machine.versions_section())
        report.add("machine", doctor_machine.hardware_section())
        report.add("limits", doctor_machine.limits_section())
        report.add("environment", doctor_machine.environment_section(os.environ))
        report.add("network", doctor_machine.network_section(os.environ))
        frameworks, findings = doctor_engines.probe(runner, seconds)
        report.add("frameworks", findings)
        if not values.quick and not frameworks.problem:
            report.add("engines", engine_findings())
    return report.end(engines)


_EXAMPLES = ("tfdist doctor --quick", "tfdist doctor --only=mirrored,multiworker --json")

if __name__ == "__main__":
    about = __doc__.partition("\n")[0]
    sys.exit(command.run("doctor", define_flags, main, about=about, examples=_EXAMPLES, has_json=True))
