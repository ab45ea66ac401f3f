"""Prepares the build of Horovod: checks its tools, patches its source, and sets its environment variables.

pip cannot build Horovod's last release with current versions of TensorFlow: its XLA bridge includes headers that no
longer exist. The first patch removes the bridge. Others let a wheel find the MPI library of its environment, let horovodrun
find its mpirun, make large all-reduces over MPI faster, and fix four defects: with Gloo, a call omitted by one rank waits
forever, because the stall inspector sees no ranks; process sets do not use the configured interface, but the address of the
host name, which is often the loopback; when a rank dies, messages between the others may no longer match, which aborts their
processes; and a second `init` in a process crashes if the environment fixes a parameter, as tfdist does.
"""

import dataclasses
import functools
import hashlib
import os
import pathlib
import platform
import re
import shlex
import shutil
import stat
import subprocess
import sys
import sysconfig
import tarfile

from tfdist.errors import InputError, TfdistError

VERSION = "0.28.1"
SDIST = f"horovod-{VERSION}.tar.gz"
PATCHED_VERSION = f"{VERSION}+tfdist.6"  # version of the patched release; change it together with the patches
SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"

# (file, line that occurs in it exactly once, replacement)
PATCHES = (
    (
        "horovod/tensorflow/CMakeLists.txt",
        'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n',
        "",
    ),
    # Python 3.12 has no distutils, and horovodrun imports this file.
    (
        "horovod/runner/js_run.py",
        "from distutils.spawn import find_executable\n",
        "from shutil import which as find_executable\n",
    ),
    # MPICH's mpirun identifies itself as HYDRA, which horovodrun does not recognize.
    (
        "horovod/runner/mpi_run.py",
        "        elif 'MPICH' in output:\n",
        "        elif 'MPICH' in output or 'HYDRA' in output:\n",
    ),
    # The stall inspector's list of ranks is reserved but never filled.
    ("horovod/common/gloo/gloo_controller.cc", "  global_ranks_.reserve(size_);\n", "  global_ranks_.resize(size_);\n"),
    # The interface was not set for process sets, including the one of all ranks.
    (
        "horovod/common/gloo/gloo_context.cc",
        "  assert(global_context.IsEnabled());\n",
        "  assert(global_context.IsEnabled());\n  gloo_iface_ = global_context.gloo_iface_;\n",
    ),
    # After a rank has died, others may receive the message of another call: raise an error that Python can catch instead of
    # aborting.
    (
        "third_party/gloo/gloo/transport/tcp/pair.cc",
        "    GLOO_ENFORCE_LE(op.preamble.length, op.nbytes);\n",
        """    if (op.preamble.length > op.nbytes) {
      auto ex = std::make_exception_ptr(::gloo::IoException(GLOO_ERROR_MSG(
          "A message of ", op.preamble.length, " bytes for ", op.nbytes, " from ", peer_.str())));
      buf->signalException(ex);
      signalException(ex);
      return -1;
    }
""",
    ),
    # Use the MPI library of the environment into which the wheel is installed, not of the one in which it was built.
    (
        "CMakeLists.txt",
        "    find_package(MPI ${MPI_REQUIRED})\n",
        '    find_package(MPI ${MPI_REQUIRED})\n    set(CMAKE_BUILD_RPATH "$ORIGIN/../../../..")\n',
    ),
    # MPI libraries allocate a buffer of the message's size. malloc does not keep blocks of more than 32 MB, so each call gets
    # new pages, which doubles its time. Pieces also allow for more elements than an int can count.
    (
        "horovod/common/ops/mpi_operations.cc",
        "MPIAllreduce::MPIAllreduce(HorovodGlobalState* global_state)\n",
        """static int AllreduceInPieces(const void* sendbuf, void* recvbuf, int64_t count, MPI_Datatype type, MPI_Op op,
                             MPI_Comm comm) {
  int width;
  MPI_Type_size(type, &width);
  const int64_t piece = 4 * 1024 * 1024 / width;
  int result = MPI_SUCCESS;
  for (int64_t at = 0; at < count && result == MPI_SUCCESS; at += piece) {
    const void* from = sendbuf == MPI_IN_PLACE ? sendbuf : (const char*)sendbuf + at * width;
    result = MPI_Allreduce(from, (char*)recvbuf + at * width, (int)std::min(piece, count - at), type, op, comm);
  }
  return result;
}

MPIAllreduce::MPIAllreduce(HorovodGlobalState* global_state)
""",
    ),
    (
        "horovod/common/ops/mpi_operations.cc",
        "      MPI_Allreduce(sendbuf, buffer_data, (int)num_elements,\n",
        "      AllreduceInPieces(sendbuf, buffer_data, num_elements,\n",
    ),
    # A second `init` crashes: it assigns defaults to parameters that an environment variable fixes, which are not in the list.
    (
        "horovod/common/parameter_manager.cc",
        "    v[index_[variable]] = value;\n",
        "    if (fixed_values_.count(variable)) return;\n    v[index_[variable]] = value;\n",
    ),
    ("horovod/__init__.py", f"__version__ = '{VERSION}'\n", f"__version__ = '{PATCHED_VERSION}'\n"),
)

# Horovod's setup.py needs an older setuptools, and Horovod's dependencies, on the PYTHONPATH of the build only.
PACKAGES = ("setuptools", "wheel", "packaging", "cloudpickle", "psutil", "PyYAML")
# Versions and hashes of these packages and of CMake.
REQUIREMENTS = pathlib.Path(__file__).with_name("horovod_build_requirements.txt")

# Locations of libraries, which the user may set; all other variables of Horovod's build are set here.
_USER_VARIABLES = re.compile("HOROVOD_(CUDA_HOME|NCCL_(HOME|INCLUDE|LIB|LINK)|BUILD_.*)")
_IRRELEVANT_LINES = re.compile(r"^[\"']|subprocess|CalledProcessError|ERROR: Failed|metadata-generation-failed|\*\*\*")


@dataclasses.dataclass(frozen=True)
class Build:
    """A build of Horovod's wheel: the version of TensorFlow, and optional libraries."""

    tensorflow: str
    gpu: bool = False
    mpi: bool = False

    @property
    def key(self) -> str:
        """Name of this build's directory in the cache, including the MPI library with which the wheel is linked."""
        python = f"python-{sys.version_info.major}.{sys.version_info.minor}"
        machine = f"{platform.system().lower()}-{platform.machine()}"
        variant = ("-gpu" if self.gpu else "") + (f"-{mpi_family()}" if self.mpi else "")
        return f"horovod-{PATCHED_VERSION}-tensorflow-{self.tensorflow}-{python}-{machine}{variant}"

    @property
    def transports(self) -> frozenset[str]:
        """Communication libraries that the wheel must support."""
        return frozenset(["Gloo"] + ["NCCL"] * self.gpu + ["MPI"] * self.mpi)


def check_tools(build: Build) -> None:
    """Raises `InputError` for the first missing tool of the build, with the Debian package that provides it."""
    compiler = (shlex.split(os.environ.get("CXX", "")) or ["g++"])[0]
    cuda = os.environ.get("HOROVOD_CUDA_HOME", "/usr/local/cuda")
    nccl = os.environ.get("HOROVOD_NCCL_INCLUDE") or f"{os.environ.get('HOROVOD_NCCL_HOME', '/usr')}/include"
    tools: list[tuple[str, object, str]] = [(compiler, shutil.which(compiler), "g++")]
    tools += [("make", shutil.which("make"), "make")]
    if build.gpu:
        path = f"{cuda}/bin{os.pathsep}{os.environ.get('PATH', '')}"
        headers = (f"{folder}/nccl.h" for folder in (nccl, f"{cuda}/include", "/usr/local/include"))
        tools += [("nvcc", shutil.which("nvcc", path=path), "nvidia-cuda-toolkit")]
        tools += [("NCCL's nccl.h", any(map(os.path.exists, headers)), "libnccl-dev, or set HOROVOD_NCCL_HOME")]
    if build.mpi:
        tools += [("mpicxx", find_mpicxx(), "libmpich-dev or libopenmpi-dev, or run `pip install mpich`")]
    for tool, location, package in tools:
        if not location:
            rule = f"Building Horovod requires {tool}, which was not found."
            raise InputError(f"{rule} Install the Debian package {package}.")


def find_mpicxx() -> str | None:
    """Returns MPI's C++ compiler in MPI_HOME, in this environment or on the PATH, or None."""
    home = os.environ.get("MPI_HOME")
    return shutil.which("mpicxx", path=os.path.join(home, "bin") if home else _search_path())


@functools.cache
def mpi_family() -> str:
    """Returns the library that `find_mpicxx` links: "openmpi", "mpich", or "libmpich" for Debian's MPICH."""
    mpicxx = find_mpicxx()
    if mpicxx is None:
        return "mpi"
    if "Open MPI" in _output_of(mpicxx, "--showme:version"):
        return "openmpi"
    return "libmpich" if "-lmpich" in _output_of(mpicxx, "-show").split() else "mpich"


def _output_of(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return "" if result.returncode else result.stdout + result.stderr


def _search_path() -> str:
    return f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ.get('PATH', '')}"


def find_cmake() -> str | None:
    """Returns a working CMake of a sufficient version, in this environment or on the PATH, or None."""
    cmake = shutil.which("cmake", path=_search_path())
    if cmake is None:
        return None
    version = re.search(r"version (\d+)\.(\d+)", _output_of(cmake, "--version"))
    return cmake if version and (int(version[1]), int(version[2])) >= (3, 13) else None


def requirement(name: str) -> str:
    """Returns the line of a package in `REQUIREMENTS`, with its version and hashes."""
    lines = REQUIREMENTS.read_text(encoding="utf-8").replace("\\\n", "").splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}=="))
    return line


def environment(build: Build, packages: pathlib.Path, cmake: str) -> dict[str, str]:
    """Returns the environment variables of a build; `packages` is the directory with `PACKAGES`."""
    variables = {k: v for k, v in os.environ.items() if _USER_VARIABLES.fullmatch(k) or not k.startswith("HOROVOD_")}
    variables |= {f"HOROVOD_WITH_{name}": "1" for name in ("TENSORFLOW", "GLOO", *["MPI"] * build.mpi)}
    variables |= {f"HOROVOD_WITHOUT_{name}": "1" for name in ("PYTORCH", "MXNET", *["MPI"] * (not build.mpi))}
    if build.gpu:
        variables["HOROVOD_GPU_OPERATIONS"] = "NCCL"
    if build.mpi and (mpicxx := find_mpicxx()):  # without resolving links, which Debian uses
        variables["MPI_HOME"] = str(pathlib.Path(mpicxx).absolute().parent.parent)
    variables |= {
        "HOROVOD_CMAKE": cmake,
        "MAKEFLAGS": f"-j{len(os.sched_getaffinity(0))}",
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # otherwise CMake 4 rejects Gloo's CMakeLists.txt
        "PYTHONPATH": os.pathsep.join(filter(None, [str(packages), os.environ.get("PYTHONPATH")])),
    }
    # Set by oneAPI's setvars.sh; Horovod would be built with oneCCL, and prefer it to MPI.
    variables.pop("CCL_ROOT", None)
    return variables


def check_hash(sdist: pathlib.Path) -> None:
    """Raises `TfdistError` if the file is not the expected release."""
    digest = hashlib.sha256(sdist.read_bytes()).hexdigest()
    if digest != SHA256:
        raise TfdistError(f"{SDIST} must have the SHA-256 {SHA256}. Received: {digest} in {sdist}. Delete that file.")


def unpack(sdist: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """Checks, unpacks and patches the source distribution; returns its top directory."""
    check_hash(sdist)
    with tarfile.open(sdist) as archive:
        # The first releases of Python 3.11 have no filters, and ignore this attribute.
        archive.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)
        archive.extractall(folder)
    source = folder / f"horovod-{VERSION}"
    patch(source)
    return source


def patch(source: pathlib.Path) -> None:
    """Applies `PATCHES`; raises `TfdistError` if a line does not occur in its file exactly once."""
    for name, line, replacement in PATCHES:
        lines = (source / name).read_text(encoding="utf-8").splitlines(keepends=True)
        if lines.count(line) != 1:
            raise TfdistError(
                f"{name} must contain the line `{line.strip()}` exactly once. Received: {lines.count(line)} times in "
                f"{source}."
            )
        lines[lines.index(line)] = replacement
        (source / name).write_text("".join(lines), encoding="utf-8")


def last_error(text: str) -> str:
    """Returns the last line with a cause in the output of compilers, CMake or pip, or else the last line."""
    lines = [line for line in map(str.strip, text.splitlines()) if line] or ["It printed nothing."]
    errors = [i for i, line in enumerate(lines) if re.search(r"(?i)error:|CMake Error", line)]
    causes = [i for i in errors if not _IRRELEVANT_LINES.search(lines[i])] or errors or [len(lines) - 1]
    cause = lines[causes[-1]]
    if cause.startswith("CMake Error") and cause.endswith(":"):  # CMake prints the reason on the next line
        cause = " ".join(lines[causes[-1] : causes[-1] + 2])
    return cause


def make_private(folder: pathlib.Path) -> None:
    """Creates a directory of the cache and its parents, unless it exists. A new directory is accessible to this user only.

    Raises:
      InputError: the directory belongs to another user, or others can write to it.
      OSError: the directory cannot be created.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise InputError(
            "The cache must be a directory that you own and that no one else can write to, because code is installed from "
            f"there. Received: {folder}, owned by user {status.st_uid}, with mode {stat.S_IMODE(status.st_mode):04o}. "
            f"Run: chmod go-w {folder}, or pass another --cache_dir."
        )
