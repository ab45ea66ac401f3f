"""The Horovod build: checks and patches, without network and compiler, and the cache of wheels: owners, modes and hashes."""

import hashlib
import os
import pathlib
import re
import stat
import sys

import pytest

from tfdist.cli import horovod_build
from tfdist.cli.horovod_build import Build
from tfdist.errors import InputError, TfdistError


@pytest.fixture
def source(tmp_path: pathlib.Path) -> pathlib.Path:
    """A source with the lines that are patched, between others."""
    for name, line, _ in horovod_build.PATCHES:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(f"// before\n{line}// behind\n")
    return tmp_path


@pytest.fixture
def no_tools(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Sets PATH to an empty directory, on a machine without CUDA."""
    tools = tmp_path / "tools"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setattr(horovod_build.sysconfig, "get_path", lambda _: str(tools))  # an environment without tools
    monkeypatch.delenv("MPI_HOME", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    for name in ("HOROVOD_CUDA_HOME", "HOROVOD_NCCL_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    return tools


def tool(folder: pathlib.Path, name: str, script: str = "exit 0") -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_each_patch_replaces_its_line(source: pathlib.Path):
    horovod_build.patch(source)
    for name, line, replacement in horovod_build.PATCHES:
        text = (source / name).read_text()
        assert f"// before\n{replacement}// behind\n" in text and f"// before\n{line}// behind" not in text
    assert horovod_build.PATCHED_VERSION in (source / "horovod/__init__.py").read_text()


@pytest.mark.parametrize("times", [0, 2])
def test_patch_refuses_a_file_without_the_line_exactly_once(source: pathlib.Path, times: int):
    name, line, _ = horovod_build.PATCHES[0]
    (source / name).write_text(line * times)
    with pytest.raises(
        TfdistError, match=r"CMakeLists.txt must contain the line .*xla_mpi_ops.* exactly once. Received: [02] times"
    ):
        horovod_build.patch(source)


def test_a_source_with_another_hash_is_refused_before_it_is_unpacked(tmp_path: pathlib.Path):
    sdist = tmp_path / horovod_build.SDIST
    sdist.write_bytes(b"not the release")
    with pytest.raises(
        TfdistError, match=f"must have the SHA-256 {horovod_build.SHA256}. Received: .* Delete that file."
    ):
        horovod_build.unpack(sdist, tmp_path / "source")
    assert not (tmp_path / "source").exists()


@pytest.mark.parametrize("name", [*horovod_build.PACKAGES, "cmake"])
def test_what_the_build_installs_is_pinned_with_hashes(name: str):
    requirement, *hashes = horovod_build.requirement(name).split(" --hash=sha256:")
    assert re.fullmatch(rf"{name}==\d+(\.\d+)+ *", requirement)
    assert hashes and all(len(bytes.fromhex(text.strip())) == hashlib.sha256().digest_size for text in hashes)


def test_the_cache_key_tells_every_build_apart():
    builds = [Build(tf, gpu, mpi) for tf in ("2.21.0", "2.22.0") for gpu in (False, True) for mpi in (False, True)]
    keys = {build.key for build in builds}
    assert len(keys) == len(builds)
    python = f"python-{sys.version_info.major}.{sys.version_info.minor}"
    assert all("0.28.1" in key and python in key and os.uname().machine in key for key in keys)
    assert Build("2.21.0").key == Build("2.21.0").key


@pytest.mark.parametrize(
    ("build", "present", "missing", "package"),
    [
        (Build("2"), (), r"g\+\+", r"g\+\+"),
        (Build("2"), ("g++",), "make", "make"),
        (Build("2", gpu=True), ("g++", "make"), "nvcc", "nvidia-cuda-toolkit"),
        (Build("2", gpu=True), ("g++", "make", "nvcc"), "NCCL's nccl.h", "libnccl-dev, or set HOROVOD_NCCL_HOME"),
        (Build("2", mpi=True), ("g++", "make"), "mpicxx", "libmpich-dev or libopenmpi-dev, or run `pip install mpich`"),
    ],
)
def test_a_missing_tool_is_named_with_its_package(no_tools, build, present, missing, package):
    for name in present:
        tool(no_tools, name)
    with pytest.raises(
        InputError, match=f"requires {missing}, which was not found. Install the Debian package {package}."
    ):
        horovod_build.check_tools(build)


def test_the_build_finds_the_mpi_of_the_environment(no_tools: pathlib.Path, tmp_path: pathlib.Path):
    tool(no_tools, "mpicxx")
    variables = horovod_build.environment(Build("2", mpi=True), tmp_path, "cmake")
    assert (variables["MPI_HOME"], variables["HOROVOD_WITH_MPI"]) == (str(no_tools.parent), "1")
    assert "MPI_HOME" not in horovod_build.environment(Build("2"), tmp_path, "cmake").keys() - os.environ.keys()


@pytest.mark.parametrize(
    ("script", "works"),
    [
        ("echo cmake version 3.25.1", True),
        ("echo cmake version 4.1.0", True),
        ("echo version 3.5.1", False),
        ("exit 1", False),
    ],
)
def test_only_a_cmake_that_runs_and_is_new_enough_counts(no_tools, monkeypatch, script, works):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(no_tools))
    assert horovod_build.find_cmake() is None
    tool(no_tools, "cmake", script)
    assert horovod_build.find_cmake() == (str(no_tools / "cmake") if works else None)


def test_the_builds_environment_is_the_same_whatever_the_user_set(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "NCCL")
    monkeypatch.setenv("HOROVOD_WITHOUT_GLOO", "1")
    monkeypatch.setenv("HOROVOD_NCCL_HOME", "/opt/nccl")
    monkeypatch.setenv("MAKEFLAGS", " --jobserver-auth=3,4")
    monkeypatch.setenv("PYTHONPATH", "/own")
    monkeypatch.setenv("CCL_ROOT", "/opt/intel/oneapi/ccl/latest")
    variables = horovod_build.environment(Build("2"), pathlib.Path("/packages"), "/bin/cmake")
    assert "CCL_ROOT" not in variables
    assert {name: value for name, value in variables.items() if name.startswith("HOROVOD_")} == {
        "HOROVOD_WITH_TENSORFLOW": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITHOUT_PYTORCH": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITHOUT_MPI": "1",
        "HOROVOD_CMAKE": "/bin/cmake",
        "HOROVOD_NCCL_HOME": "/opt/nccl",
    }
    assert variables["MAKEFLAGS"] == f"-j{len(os.sched_getaffinity(0))}"
    assert variables["PYTHONPATH"] == "/packages:/own"


@pytest.mark.parametrize(
    ("output", "cause"),
    [
        (
            "  a.cc:1:10: fatal error: highwayhash/arch_specific.h: No such file\n"
            "  make[2]: *** [CMakeFiles/x.o] Error 1\n  subprocess.CalledProcessError: Command '['cmake']' returned\n"
            "  error: subprocess-exited-with-error\n"
            "  ERROR: Failed building wheel for horovod\nFailed to build horovod\n",
            "a.cc:1:10: fatal error: highwayhash/arch_specific.h: No such file",
        ),
        (
            "  CMake Error at CMakeLists.txt:3 (find_package):\n    Could not find Foo\n\n-- Configuring incomplete\n",
            "CMake Error at CMakeLists.txt:3 (find_package): Could not find Foo",
        ),
        (
            "Looking\nERROR: No matching distribution found for horovod==0.28.1\n",
            "ERROR: No matching distribution found",
        ),
        ("Killed\n", "Killed"),
        ("", "It printed nothing."),
    ],
)
def test_the_last_error_is_the_cause_and_not_its_echo(output: str, cause: str):
    assert horovod_build.last_error(output).startswith(cause)


def test_a_new_directory_is_private_and_one_that_others_can_read_is_used(tmp_path: pathlib.Path):
    folder = tmp_path / "cache" / "wheels"
    horovod_build.make_private(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o755)
    horovod_build.make_private(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
