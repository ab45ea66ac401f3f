"""Build Horovod for the installed TensorFlow, and install it.

The wheel is cached for other environments with the same versions. Other packages are not changed: build dependencies are
installed into a temporary directory.
"""

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping

from tfdist.cli import command, horovod_build
from tfdist.cli.horovod_build import PATCHED_VERSION, SDIST, SHA256, VERSION, Build
from tfdist.config.fields import flag_field
from tfdist.errors import InputError, TfdistError

# Horovod's CMake looks for TensorFlow in the running Python, so build isolation would not work.
_FROM_SOURCE = ("--no-deps", "--use-pep517", "--no-build-isolation")

_PROBE = """
import json, pathlib, horovod
metadata = json.loads((pathlib.Path(horovod.__path__[0]) / "metadata.json").read_text())
import horovod.tensorflow as hvd
has = {"Gloo": hvd.gloo_built(), "NCCL": hvd.nccl_built(), "MPI": hvd.mpi_built()}
print(json.dumps([horovod.__version__, metadata["tensorflow"], [name for name, built in has.items() if built]]))
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class InstallConfig:
    """The flags of this command."""

    gpu: bool = flag_field(False, "Flags", "Build for NCCL (needs nvcc and NCCL's headers).")
    mpi: bool = flag_field(False, "Flags", "Build for MPI as well (needs mpicxx).")
    force: bool = flag_field(False, "Flags", "Build and install Horovod even if it is already installed.")
    cache_dir: str = flag_field(
        os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "tfdist", "horovod"),
        "Flags",
        "Directory for cached wheels.",
    )


class Log:
    """A log file, to which the output of pip is appended."""

    def __init__(self, path: pathlib.Path):
        self.path = path
        path.write_text("", encoding="utf-8")

    def pip(self, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        """Runs this environment's pip; raises `TfdistError` with the last error line if it fails."""
        pip = [sys.executable, "-P", "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"$ {shlex.join(pip)}\n")
            file.flush()
            result = subprocess.run(pip, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment)
        if result.returncode:
            cause = horovod_build.last_error(self.path.read_text(encoding="utf-8", errors="replace"))
            raise TfdistError(f"`pip {arguments[0]}` failed: {cause} (log: {self.path})")


def main(config: InstallConfig) -> None:
    """Installs Horovod, unless it already works, and prints a line for each stage.

    Raises:
      InputError: TensorFlow, pip or a build tool is missing, the cache is not writable, or other users can write to it.
      TfdistError: the download, the build, the installation or the import failed.
    """
    build = Build(_tensorflow_version(), config.gpu, config.mpi)
    cache = pathlib.Path(config.cache_dir).expanduser().resolve()
    if not config.force and importlib.util.find_spec("horovod"):
        try:
            _print_line(
                f"Horovod {PATCHED_VERSION} ({_transports(build)}) works with TensorFlow {build.tensorflow}. Nothing to do."
            )
            return
        except TfdistError as error:
            _print_line(f"Replacing the installed Horovod. {error}")
    folder = cache / build.key
    try:
        horovod_build.make_private(cache)
        horovod_build.make_private(folder)
        log = Log(folder / "install.log")
    except OSError as error:
        raise InputError(f"The cache must be writable. Received: {error}. Pass another --cache_dir.") from error
    _print_line(f"Horovod {PATCHED_VERSION} for TensorFlow {build.tensorflow}; log: {log.path}")
    cached_wheels = [] if config.force else list(folder.glob("*.whl"))
    wheel = cached_wheels[0] if cached_wheels else make_wheel(build, cache, log)
    _print_line(f"Installing {wheel}")
    log.pip("install", "--force-reinstall", "--no-deps", str(wheel))
    log.pip("install", str(wheel))  # installs missing dependencies
    _print_line(f"import horovod.tensorflow works ({_transports(build)}).")


def make_wheel(build: Build, cache: pathlib.Path, log: Log) -> pathlib.Path:
    """Builds the wheel, adds it to the cache, and returns its path.

    The directory `cache` must contain a directory named `build.key`. If it has no source distribution, downloads one.
    """
    horovod_build.check_tools(build)
    with tempfile.TemporaryDirectory(prefix="build-", dir=cache) as scratch:
        folder = pathlib.Path(scratch)
        packages = folder / "packages"
        _print_line(f"Fetching build dependencies: {' '.join(horovod_build.PACKAGES)}")
        _fetch(horovod_build.PACKAGES, packages, log)
        cmake = horovod_build.find_cmake() or _pip_cmake(folder / "cmake", log)
        environment = horovod_build.environment(build, packages, cmake)
        sdist = cache / SDIST
        if not sdist.exists():
            _print_line(f"Downloading {SDIST}")
            _download(folder, log, environment).replace(sdist)
        _print_line(f"Unpacking and patching {sdist}")
        source = horovod_build.unpack(sdist, folder)
        _print_line(f"Building with make {environment['MAKEFLAGS']}: this takes minutes")
        arguments = ["--verbose", *_FROM_SOURCE, "--wheel-dir", str(folder), str(source)]
        log.pip("wheel", *arguments, environment=environment)
        (new_wheel,) = folder.glob("*.whl")
        return new_wheel.replace(cache / build.key / new_wheel.name)


def _fetch(names: Iterable[str], folder: pathlib.Path, log: Log) -> None:
    """Installs packages of `horovod_build.REQUIREMENTS` into a directory; pip checks their hashes."""
    requirements = folder.with_suffix(".txt")
    requirements.write_text("\n".join(map(horovod_build.requirement, names)), encoding="utf-8")
    # The versions are fixed and not installed into this environment, whose constraints could only conflict with them.
    environment = {**os.environ, "PIP_CONSTRAINT": os.devnull}
    arguments = ["--only-binary", ":all:", "--require-hashes", "--requirement", str(requirements)]
    log.pip("install", "--target", str(folder), *arguments, environment=environment)


def _pip_cmake(folder: pathlib.Path, log: Log) -> str:
    _print_line("CMake not found: fetching it from PyPI")
    try:
        _fetch(["cmake"], folder, log)
    except TfdistError as error:
        raise InputError(f"Building Horovod requires CMake, and {error}. Install the Debian package cmake.") from error
    return str(folder / "cmake" / "data" / "bin" / "cmake")


def _download(folder: pathlib.Path, log: Log, environment: Mapping[str, str]) -> pathlib.Path:
    # pip runs setup.py to get metadata, so pip must check the hash before that.
    requirement = folder / "requirement.txt"
    requirement_line = f"horovod=={VERSION} --hash=sha256:{SHA256}"
    requirement.write_text(f"--no-binary horovod\n--require-hashes\n{requirement_line}\n", encoding="utf-8")
    arguments = [*_FROM_SOURCE, "--dest", str(folder), "--requirement", str(requirement)]
    log.pip("download", *arguments, environment=environment)
    horovod_build.check_hash(folder / SDIST)
    return folder / SDIST


def _transports(build: Build) -> str:
    """Imports Horovod in a new process and returns its communication libraries; raises `TfdistError` on failure."""
    probe = [sys.executable, "-P", "-c", _PROBE]
    result = subprocess.run(probe, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if result.returncode:
        raise TfdistError(f"`import horovod.tensorflow` failed: {horovod_build.last_error(result.stderr)}")
    version, tensorflow, transports = json.loads(result.stdout.splitlines()[-1])
    if (version, tensorflow) != (PATCHED_VERSION, build.tensorflow) or not build.transports <= set(transports):
        required_names = ", ".join(sorted(build.transports))
        raise TfdistError(
            f"Horovod must be {PATCHED_VERSION} for TensorFlow {build.tensorflow} with {required_names}. "
            f"Received: {version} for {tensorflow} with {', '.join(transports)}."
        )
    return ", ".join(transports)


def _tensorflow_version() -> str:
    if importlib.util.find_spec("pip") is None:
        raise InputError(f"pip is required, but was not found in {sys.prefix}. Run `python -m ensurepip`.")
    try:
        return importlib.metadata.version("tensorflow")
    except importlib.metadata.PackageNotFoundError as error:
        raise InputError(
            f"TensorFlow is required, but was not found in {sys.prefix}. Run `pip install tensorflow`."
        ) from error


def _print_line(line: str) -> None:
    print(line, flush=True)


_EXAMPLES = ("tfdist install_horovod", "tfdist install_horovod --mpi")

if __name__ == "__main__":
    about = __doc__.partition("\n")[0]
    sys.exit(command.run("install_horovod", InstallConfig, main, about=about, examples=_EXAMPLES))
