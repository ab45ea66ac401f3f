"""Sections that need no process: what is found, and when it is a warning."""

import resource
import socket
import sys

import pytest

from tests.cluster.environment_test import STEP
from tfdist.cli import doctor_engines, doctor_machine
from tfdist.cli.doctor_machine import Finding, Status
from tfdist.cli.horovod_build import PATCHED_VERSION
from tfdist.errors import byte_size


def bad(section: list[Finding]) -> list[Finding]:
    return [found for found in section if found.status != Status.OK]


def test_secrets_are_not_shown():
    given = {
        "TFDIST_TOKEN": "hidden",
        "TFDIST_TOKEN_FILE": "/home/me/token",
        "HOROVOD_SECRET_KEY": "hidden",
        "_HOROVOD_SECRET_KEY": "hidden",
        "SLURM_JWT": "hidden",
        "HOROVOD_CYCLE_TIME": "0.5",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "EDITOR": "vi",
        "TF_CLI_CONFIG_FILE": "/home/me/.terraformrc",  # of Terraform
        "AWS_SECRET_ACCESS_KEY": "hidden",
    }
    section = doctor_machine.environment_section(given)
    assert [found.text for found in section[1:]] == [
        "HOROVOD_CYCLE_TIME=0.5",
        "HOROVOD_SECRET_KEY=(set, not shown)",
        "SLURM_JWT=(set, not shown)",
        "TFDIST_TOKEN=(set, not shown)",
        "TFDIST_TOKEN_FILE=/home/me/token",
        "TF_CPP_MIN_LOG_LEVEL=3",
        "_HOROVOD_SECRET_KEY=(set, not shown)",
    ]


def test_the_launcher_that_variables_tell_of():
    assert doctor_machine.environment_section({})[0].text == "this is a single process"
    assert doctor_machine.environment_section(STEP)[0].text == "Slurm says that this is rank 5 of 7"
    contradicting = STEP | {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "n1"}
    [warning] = bad(doctor_machine.environment_section(contradicting))
    assert "All environment variables must give this process the same rank and size" in warning.text


def test_versions_that_are_not_supported(monkeypatch: pytest.MonkeyPatch):
    found = {"python": "3.99.1", "tfdist": "0.1.0", "tensorflow": "2.99.0", "horovod": "0.28.1", "numpy": "2.0.0"}
    monkeypatch.setattr(doctor_machine, "versions", lambda: found)
    section = doctor_machine.versions_section()
    keras, *rest = sorted(bad(section), key=lambda each: each.status)
    assert keras.status == Status.FAILED and keras.text == "Keras is not installed, and tfdist requires it"
    assert {each.text.partition(" is not")[0]: each.remedy for each in rest} == {
        "Python 3.99.1": "Use a supported version.",
        "TensorFlow 2.99.0": "pip install 'tensorflow<2.22,>=2.21'",
        "Horovod 0.28.1": "tfdist install_horovod",
    }
    assert f"Horovod 0.28.1 is not supported; supported: {PATCHED_VERSION}" in [each.text for each in rest]


def test_few_open_files(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 4096))
    assert [(found.status, found.text) for found in bad(doctor_machine.limits_section())] == [
        ("warning", "only 256 files may be open"),
        ("warning", "only 256 processes and threads are allowed"),
    ]


def test_limits_of_a_container(monkeypatch: pytest.MonkeyPatch, tmp_path):
    memory, quota = tmp_path / "memory.max", tmp_path / "cpu.max"
    memory.write_text(f"{1 << 30}\n")
    quota.write_text("150000 100000\n")
    monkeypatch.setattr(doctor_machine, "_MEMORY_LIMIT", memory)
    monkeypatch.setattr("tfdist.cluster.affinity.QUOTA", quota)
    section = doctor_machine.hardware_section()
    assert section[0].text.endswith(", with a CPU quota of 1.5 cores")
    assert any(found.text.startswith(f"only {byte_size(1 << 30)} of memory is free") for found in bad(section))
    memory.write_text("max\n")
    quota.write_text("max 100000\n")
    section = doctor_machine.hardware_section()
    assert "quota" not in section[0].text and "the container may use" not in section[1].text


def test_a_loopback_that_cannot_be_bound(monkeypatch: pytest.MonkeyPatch):
    assert not doctor_machine.loopback_problem()
    monkeypatch.setattr(doctor_machine, "LOOPBACK", "203.0.113.7")  # an address for documentation, which no host has
    [failed] = [found for found in bad(doctor_machine.network_section({})) if found.status == Status.FAILED]
    assert failed.text == "203.0.113.7 cannot be used: Cannot assign requested address"


def test_a_host_name_that_cannot_be_resolved(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "nowhere.invalid")
    section = doctor_machine.network_section({})
    assert any("nowhere.invalid cannot be resolved" in found.text for found in bad(section))


def test_tokens(tmp_path):
    def found(environment: dict[str, str]) -> Finding:
        section = doctor_machine.network_section(environment)
        assert "hidden" not in str(section)
        return section[-1]

    assert found({}).status == Status.OK
    assert found({"TFDIST_TOKEN": "hidden" * 6}).text == "a token for jobs on several hosts is set"
    assert "has 6 characters; jobs on several hosts need 16" in found({"TFDIST_TOKEN": "hidden"}).text
    open_to_all = tmp_path / "token"
    open_to_all.write_text("hidden" * 6)
    open_to_all.chmod(0o644)
    assert "no one else may read or write" in found({"TFDIST_TOKEN_FILE": str(open_to_all)}).text


def test_an_interface_that_is_not_there():
    [warning] = [
        found for found in bad(doctor_machine.network_section({"HOROVOD_GLOO_IFACE": "none0"})) if "none0" in found.text
    ]
    assert warning.remedy == "unset HOROVOD_GLOO_IFACE"


def test_another_backend_of_keras_is_told_without_an_import(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    monkeypatch.delitem(sys.modules, "keras", raising=False)
    found, section = doctor_engines.probe(None, 1.0)
    assert found.problem and [each.remedy for each in section] == ["Set KERAS_BACKEND=tensorflow"]


def test_tools_that_a_build_needs_come_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor_engines.shutil, "which", lambda tool: None if tool == "g++" else tool)
    assert doctor_engines.add_build_tools("python -m x") == "apt install g++ && python -m x"
