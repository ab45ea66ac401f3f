"""The report as users get it: each engine is tried, and a broken one is a line of it."""

import contextlib
import dataclasses
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
from absl import flags as absl_flags

from tests import documented_json
from tests.user_commands import captured
from tfdist import doctor
from tfdist.cli import doctor_engines
from tfdist.cli.doctor_engines import Frameworks, ProgramResult, SmokeTestResult
from tfdist.cli.doctor_machine import Finding, Status
from tfdist.cli.output import TEXT
from tfdist.cluster import environment
from tfdist.config.strategy_registry import NAMES, strategy_declaration
from tfdist.errors import ExitCode

pytestmark = pytest.mark.processes

SECRET = "a-secret-of-this-test"
HAS_HOROVOD = importlib.util.find_spec("horovod") is not None


def run(*flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    own = environment.without_rank_variables(os.environ) | variables
    return captured([sys.executable, "-m", "tfdist.doctor", *flags], env=own, timeout=600)


def test_every_engine_is_tried_and_json_says_how():
    done = run("--json", TFDIST_TOKEN=SECRET)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(done.stdout)
    documented_json.check("doctor", record)
    assert record["works"] and SECRET not in done.stdout
    assert (
        sum("--shard=optimizer" in one["flags"] for one in record["engines"] if one["status"] == "ok")
        == 1 + HAS_HOROVOD
    )
    found = {(one["strategy"], one["library"]): one for one in record["engines"]}
    assert {strategy for strategy, _ in found} == set(NAMES)
    assert {one["strategy"] for one in record["engines"] if one["status"] == "ok"} >= {*NAMES} - {"tpu", "horovod"}
    assert HAS_HOROVOD == (found["horovod", "Gloo"]["status"] == "ok")
    built = any(one["text"].startswith("Horovod was built with Gloo") for one in record["findings"])
    assert built == HAS_HOROVOD
    assert all(one["seconds"] > 0 and not one["reason"] for one in record["engines"] if one["status"] == "ok")
    assert not [one for one in record["findings"] if one["status"] == "failed"]


@pytest.mark.smoke("doctor")
def test_a_horovod_that_cannot_be_imported_fails_alone(tmp_path: pathlib.Path):
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("raise ImportError('undefined symbol: _ZN10tensorflow6Status')\n")
    done = run("--only=horovod", PYTHONPATH=str(tmp_path), TFDIST_TOKEN=SECRET)
    assert done.returncode == 1 and not done.stderr, done.stdout + done.stderr
    said = [" ".join(line.split()) for line in done.stdout.splitlines()]
    reason = "Horovod cannot be imported: ImportError: undefined symbol: _ZN10tensorflow6Status"
    assert f"failed {reason}" in said
    at = said.index(f"failed horovod over Gloo, 2 processes {reason}")
    assert said[at + 1].endswith("tfdist install_horovod --force")
    assert "ok TensorFlow can be imported, and finds no GPU" in said
    assert "ok TFDIST_TOKEN=(set, not shown)" in said and SECRET not in done.stdout


def test_a_loopback_that_is_down():
    unshare = ("unshare", "--map-root-user", "--net")
    if not shutil.which("unshare") or captured([*unshare, "true"]).returncode:
        pytest.skip("this system permits no network namespaces")
    code = "from tfdist.cli import doctor_machine; print(doctor_machine.network_section({})[1].text)"
    done = captured([*unshare, sys.executable, "-c", code])
    assert done.stdout == "127.0.0.1 cannot be used: Network is unreachable\n", done.stderr


class _Fake(contextlib.nullcontext):
    """Starts nothing, and says how the processes of each module ended."""

    def __init__(self, **ended: ProgramResult):
        super().__init__(self)
        self.ended, self.variables = ended, {}

    def run_module(self, module, arguments, processes, seconds, variables=None):
        self.variables = variables
        return self.ended[module.rpartition(".")[2]]


def test_json_says_what_the_text_says(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    ended = {
        "tensorflow_probe": ProgramResult(0, "", '{"gpus": ["A100"], "is_built_with_cuda": true}\n', 1.0),
        "horovod_probe": ProgramResult(132, "rank 0 ended with code 132 (killed by SIGILL)", "", 1.0),
        "verify": ProgramResult(ExitCode.STALLED, "the processes did not end within 60 s", "", 60.5),
    }
    monkeypatch.setattr(doctor, "ModuleRunner", lambda: _Fake(**ended))
    monkeypatch.setattr(doctor_engines, "_has_horovod", lambda: True)
    values = absl_flags.FlagValues()
    doctor.define_flags(values)
    values(["doctor"])
    assert doctor.main(values, TEXT) == 1
    said = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    record = documented_json.printed("doctor", doctor.main, values, code=1)
    assert not capsys.readouterr().out
    assert not record["works"] and "ok TensorFlow's GPUs: A100" in said
    for one in (one for one in record["findings"] if one["section"] != "machine"):  # which changes meanwhile
        assert f"{one['status']} {one['text']}" in said
        assert one["remedy"] is None or f"-> {one['remedy']}" in said
    failed = [one for one in record["findings"] if one["status"] == "failed"]
    assert said[-1].startswith(f"{len(failed)} failed; ")
    assert "HOROVOD_BUILD_ARCH_FLAGS" in failed[0]["remedy"]
    assert [one["status"] for one in record["engines"]].count("failed") == len(failed) - 1
    mirrored = record["engines"][1]
    assert (mirrored["seconds"], mirrored["reason"]) == (60.5, "the processes did not end within 60 s")
    assert f"failed mirrored, 2 devices 60.5 s {mirrored['reason']}" in said
    assert f"-> To see its output: {mirrored['command']}" in said


HOROVOD = {"libraries": ["Gloo"], "mpi_library": "", "starts_without_mpirun": True}
INSTALLED = Frameworks("", 0, HOROVOD, None)


def tried(name: str, ended: ProgramResult, frameworks: Frameworks = INSTALLED) -> list[SmokeTestResult]:
    return list(doctor_engines.run_smoke_tests(_Fake(verify=ended), frameworks, [name], 1))


def test_what_is_not_installed_is_missing_with_the_command_that_installs_it():
    works = ProgramResult(0, "", "", 1.0)
    gloo, sharded, mpi = tried("horovod", works)
    assert (gloo.status, sharded.status) == ("ok", "ok")
    assert (mpi.status, mpi.reason) == ("missing", "Horovod was built without MPI")
    assert mpi.remedy.endswith("pip install mpich && tfdist install_horovod --mpi")
    gloo, *_ = tried("horovod", works, Frameworks("", 0, None, None))
    assert (gloo.status, gloo.reason) == ("missing", "Horovod is not installed")
    assert gloo.remedy.endswith("tfdist install_horovod")
    open_mpi = HOROVOD | {"libraries": ["Gloo", "MPI"], "mpi_library": "Open MPI 4.1", "starts_without_mpirun": False}
    *_, mpi = tried("horovod", works, Frameworks("", 0, open_mpi, None))
    assert (mpi.status, mpi.reason) == (
        "missing",
        "not tested: processes that use Open MPI 4.1 can be started only by mpirun",
    )
    [tpu] = tried("tpu", works)
    assert (tpu.status, tpu.reason) == ("missing", "not tested here: it runs on the cores of a TPU")


def test_an_engine_that_fails_says_why_and_how_to_see_more():
    _, sharded = tried("multiworker", ProgramResult(ExitCode.STALLED, "the processes did not end within 1 s", "", 1.0))
    assert sharded.finding() == Finding(
        Status.FAILED,
        f"{'multiworker, 2 processes, sharded':<39}  1.0 s  the processes did not end within 1 s",
        "To see its output: tfdist launch --processes=2 -- tfdist verify '--model=mlp(hidden=(8,))' "
        "--dataset=synthetic:4x4x1 --batch_size=8 --steps=2 --strategy=multiworker --shard=optimizer",
    )


def test_a_wrong_result_is_a_failure():
    result = {"replicas_equal": False, "largest_difference": 0.5, "difference_unit": "relative", "tolerance": 1e-5}
    [mirrored] = tried("mirrored", ProgramResult(1, json.dumps(result), "", 1.0))
    assert mirrored.reason == (
        "its replicas differ; its weights differ from those of one device by 0.5 (relative; tolerance 1e-05)"
    )


@pytest.mark.parametrize(("gpus", "hidden"), [(0, False), (1, True), (2, False)])
def test_replicas_that_have_no_gpu_each_run_on_the_cpu(gpus: int, hidden: bool):
    fake = _Fake(verify=ProgramResult(0, "", "", 1.0))
    list(doctor_engines.run_smoke_tests(fake, INSTALLED._replace(gpus=gpus), ["mirrored"], 1))
    assert ("CUDA_VISIBLE_DEVICES" in fake.variables) == hidden


def test_smoke_tests_fit_their_strategies():
    for name in NAMES:
        declaration = strategy_declaration(name)
        assert bool(declaration.smoke_tests) == (name != "tpu")
        for test in declaration.smoke_tests:
            assert dataclasses.asdict(test)["options"].keys() <= set(declaration.options or ())
