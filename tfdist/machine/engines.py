"""Tests each engine: two training steps, compared with those of one device by `tfdist verify`."""

import json
from collections.abc import Iterator, Sequence

from tfdist.config.strategy_registry import DECLARATIONS
from tfdist.errors import ExitCode
from tfdist.machine.children import Children, Ended
from tfdist.machine.frameworks import Frameworks
from tfdist.machine.report import Finding, Status
from tfdist.machine.smoke_tests import SmokeTestResult, run_smoke_test

_VERIFY = ("tfdist.verify", "--model=mlp(hidden=(8,))", "--dataset=synthetic:4x4x1", "--batch_size=8", "--steps=2")


def run_smoke_tests(
    children: Children, frameworks: Frameworks, names: Sequence[str], seconds: float
) -> Iterator[SmokeTestResult]:
    """Tests strategies one after the other.

    Args:
      children: starts the processes.
      frameworks: TensorFlow and Horovod on this machine.
      names: names of the strategies.
      seconds: deadline of each smoke test.
    """
    for declaration in DECLARATIONS:
        if declaration.name not in names:
            continue
        if not declaration.smoke_tests:
            yield SmokeTestResult(
                declaration.name, None, Status.MISSING, reason=f"not tried here: it runs on {declaration.help}"
            )
        for test in declaration.smoke_tests:
            result = run_smoke_test(children, frameworks, declaration.name, test, _VERIFY, seconds)
            yield result._replace(reason=_reason(result.ended)) if result.ended else result


def finding(result: SmokeTestResult) -> Finding:
    """Returns the line of a smoke test in the report."""
    duration = [f"{result.ended.seconds:.1f} s"] if result.ended else []
    return result.finding(f"{_title(result):<39}", *duration)


def _title(result: SmokeTestResult) -> str:
    """Returns the engine, and the processes and devices of its test."""
    if result.test is None:
        return result.engine
    processes, devices = result.test.processes, result.test.devices
    parts = [f"{processes} processes"] if processes > 1 else []
    parts += [f"{devices} devices"] if devices > 1 else []
    parts += ["sharded"] if "shard" in result.test.options else []
    return ", ".join([result.engine, *parts])


def _reason(ended: Ended) -> str:
    if ended.code == ExitCode.FAILED and ended.reason.startswith("{"):  # it has ended with its result
        result = json.loads(ended.reason)
        equal = "" if result["replicas_equal"] else "its replicas differ; "
        return (
            f"{equal}its weights differ from those of one device by {result['largest_difference']} "
            f"({result['difference_unit']}; tolerance {result['tolerance']})"
        )
    return ended.reason
