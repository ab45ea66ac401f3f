"""Report the state of this machine, and test each engine in separate processes.

The exit code is 0 if all installed components work, and 1 if one of them fails.
"""

import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from absl import flags

from tfdist.cli import command, doctor_engines, doctor_machine
from tfdist.cli.doctor_engines import Children, SmokeTestResult
from tfdist.cli.doctor_machine import Finding, Section, Status, lines
from tfdist.cli.output import Output
from tfdist.config.strategy_registry import NAMES
from tfdist.errors import ExitCode, InputError
from tfdist.errors.formatting import nearest

_TITLES = {
    "versions": "Versions",
    "machine": "Machine",
    "limits": "Limits",
    "environment": "Launcher and relevant environment variables",
    "network": "Network",
    "frameworks": "TensorFlow and Horovod",
    "engines": "Engines: two training steps, compared with one device",
    "speeds": "Speed of an all-reduce between two processes on this machine, which should be idle",
}


class _Report:
    def __init__(self, output: Output):
        self._output = output
        self._findings: list[dict[str, str | None]] = []
        self._results: dict[str, list[dict[str, Any]]] = {"engines": [], "speeds": []}

    def add(self, section: Section) -> None:
        self._title(section.name)
        for finding in section.findings:
            self._add_finding(section.name, finding)

    def add_engines(self, smoke_tests: Iterable[SmokeTestResult]) -> None:
        self._title("engines")
        for result in smoke_tests:
            self._add_finding("engines", doctor_engines.smoke_test_finding(result))
            self._results["engines"].append(result.facts())

    def add_speeds(self, smoke_tests: Iterable[SmokeTestResult]) -> None:
        self._title("speeds")
        results = []
        for result in smoke_tests:
            self._add_finding("speeds", doctor_engines.speed_finding(result))
            results.append(result)
        self._results["speeds"] = [doctor_engines.speed_facts(result) for result in results]
        if fastest := doctor_engines.fastest_finding(results):
            self._add_finding("speeds", fastest)

    def end(self) -> bool:
        """Prints the summary; returns whether everything installed works."""
        counts = {status: sum(finding["status"] == status for finding in self._findings) for status in Status}
        failure_count = counts[Status.FAILED]
        summary = f"{failure_count} failed" if failure_count else "Everything installed works"
        summary += f"; {counts[Status.MISSING]} missing, {counts[Status.WARNING]} warnings."
        self._output.line(f"\n{summary}")
        self._output.result({"works": not failure_count, "findings": self._findings, **self._results})
        return not failure_count

    def _title(self, name: str) -> None:
        if self._findings:
            self._output.line()
        self._output.line(_TITLES[name])

    def _add_finding(self, section: str, finding: Finding) -> None:
        for line in lines(finding):
            self._output.line(line)
        text = " ".join(finding.text.split())
        self._findings.append(
            {"section": section, "status": str(finding.status), "text": text, "remedy": finding.remedy or None}
        )


def define_flags(values: flags.FlagValues) -> None:
    """Defines the flags of this command."""
    about = f"Comma-separated strategies to try: {', '.join(NAMES)}. Defaults to all."
    flags.DEFINE_string("only", "", about, flag_values=values)
    flags.DEFINE_bool("quick", False, "Do not try the engines.", flag_values=values)
    about = "Also measure an all-reduce of each engine between two processes, and name the fastest."
    flags.DEFINE_bool("speed", False, about, flag_values=values)
    about = "Seconds after which a smoke test of an engine, or an import, is stopped and counts as failed."
    flags.DEFINE_float("deadline_seconds", 60.0, about, flag_values=values)


def main(values: flags.FlagValues, output: Output) -> int:
    """Prints the report; returns the exit code."""
    names, seconds = _names(values.only), values.deadline_seconds
    if not seconds > 0:
        raise InputError(f"--deadline_seconds must be positive. Received: {seconds:g}.")
    report = _Report(output)
    with Children() as children:
        report.add(doctor_machine.versions_section())
        report.add(doctor_machine.hardware_section())
        report.add(doctor_machine.limits_section())
        report.add(doctor_machine.environment_section(os.environ))
        report.add(doctor_machine.network_section(os.environ))
        frameworks, section = doctor_engines.probe(children, seconds)
        report.add(section)
        if not values.quick and not frameworks.problem:
            report.add_engines(doctor_engines.run_smoke_tests(children, frameworks, names, seconds))
        if values.speed and not frameworks.problem:
            report.add_speeds(doctor_engines.measure_speeds(children, frameworks, names, seconds))
    return ExitCode.DONE if report.end() else ExitCode.FAILED


def _names(text: str) -> Sequence[str]:
    names = [name.strip() for name in text.split(",") if name.strip()] or NAMES
    for name in names:
        if name not in NAMES:
            raise InputError(f"--only must name strategies. Received: {name}.{nearest(name, NAMES)}")
    return names


_EXAMPLES = ("tfdist doctor --quick --speed", "tfdist doctor --only=mirrored,multiworker --json")

if __name__ == "__main__":
    about = __doc__.partition("\n")[0]
    sys.exit(command.run("doctor", define_flags, main, about=about, examples=_EXAMPLES, has_json=True))
