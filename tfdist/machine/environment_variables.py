"""Environment variables that tfdist or the engines read, and the launcher that has set them. Secrets are not shown."""

import re
from collections.abc import Mapping

from tfdist.cluster.environment import describe, detect_cluster, hint
from tfdist.errors import InputError
from tfdist.machine.report import Finding, Section, Status

_READ = re.compile(
    r"_?(TFDIST|TF(?!_(CLI|VAR)_)|HOROVOD|KERAS|TFDS|XLA|DTENSOR|CUDA|NCCL|GRPC|GLOO|UCX|FI|OMPI|PMI|PMIX|MPI|MPICH|HYDRA|I_MPI|SLURM|OMP|KMP"
    r"|TORCHELASTIC|MASTER)_\w+"
    r"|JOB_COMPLETION_INDEX|JOB_NAME|SERVICE|(LOCAL_)?RANK|(LOCAL_)?WORLD_SIZE|GCE_METADATA_IP"
    r"|XDG_CACHE_HOME|TMPDIR|PYTHONPATH|LD_LIBRARY_PATH|LD_PRELOAD|ROCR_VISIBLE_DEVICES"
)
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|JWT|(^|_)KEY(S|$|_)|(^|_)AUTH")
_OWN = {"TF_CPP_MIN_LOG_LEVEL": "2", "UCX_DEBUG_SIGNO": "0", "UCX_HANDLE_ERRORS": ""}  # set by `import tfdist`
_PATHS = ("_FILE", "_DIR")  # the path of a secret is not secret
_MAX_LENGTH = 100  # characters of a value in the text


def section(environment: Mapping[str, str]) -> Section:
    """Returns the variables that are set, and the launcher that started this process, if any."""
    names = sorted(name for name, value in environment.items() if _READ.fullmatch(name) and _OWN.get(name) != value)
    variables = {name: None if is_secret(name) else environment[name] for name in names}
    launcher = _launcher(environment)
    facts = {"launcher": launcher.text, "variables": variables}
    findings = [Finding(Status.OK, f"{name}={_text(value)}") for name, value in variables.items()]
    return Section("environment", facts, [launcher, *findings])


def is_secret(name: str) -> bool:
    """Returns whether the value of a variable may be a secret, by its name."""
    return bool(_SECRET.search(name.upper())) and not name.endswith(_PATHS)


def _launcher(environment: Mapping[str, str]) -> Finding:
    try:
        cluster = detect_cluster(environment)
    except InputError as error:
        return Finding(Status.WARNING, str(error), "Unset the variables of the wrong launcher.")
    return Finding(Status.OK, f"{describe(cluster)}{hint(environment)}")


def _text(value: str | None) -> str:
    if value is None:
        return "(set, not shown)"
    return value if len(value) <= _MAX_LENGTH else f"{value[:_MAX_LENGTH]}..."
