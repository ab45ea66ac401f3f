import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import sys

import pytest

from tfdist.reporting import environment


@pytest.fixture
def description():
    return environment.describe(["alpha", "alpha", "beta"], start_time=1770000000.0)


def test_a_package_that_is_not_installed_is_left_out(monkeypatch):
    monkeypatch.setattr(environment, "_PACKAGES", ("numpy", "no-such-package"))
    assert set(environment.versions()) == {"python", "numpy"}


def test_versions_hosts_command_time_and_machine(description):
    versions = {name: importlib.metadata.version(name) for name in ("tensorflow", "keras", "numpy")}
    assert (versions | {"python": platform.python_version()}).items() <= description["versions"].items()
    assert description["hosts"] == ["alpha", "alpha", "beta"]
    assert shlex.split(description["command"]) == sys.orig_argv
    assert datetime.datetime.fromisoformat(description["started"]).timestamp() == 1770000000.0
    assert description["platform"] == platform.platform()
    assert description["cpu_count"] == os.cpu_count()
    assert json.loads(json.dumps(description)) == description


def test_no_environment_variable_gets_in(monkeypatch):
    monkeypatch.setenv("MY_API_TOKEN", "s3cret-value")
    text = json.dumps(environment.describe([], start_time=0.0))
    assert "s3cret-value" not in text and "MY_API_TOKEN" not in text
