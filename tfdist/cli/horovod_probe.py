"""Prints Horovod's libraries and the choice of `--communication=auto` as one line of JSON.

python -m tfdist.cli.horovod_probe PROCESSES
"""

import json
import sys

import horovod.tensorflow as hvd

from tfdist.cluster.environment import Cluster
from tfdist.coordination import LocalGroup
from tfdist.distribution import horovod_rendezvous
from tfdist.distribution.horovod_rendezvous import automatic_choice
from tfdist.errors import InputError


def describe(processes: int) -> dict[str, object]:
    """Returns the libraries, and the choice for a job with this number of processes on this host."""
    built = {"Gloo": hvd.gloo_built(), "NCCL": hvd.nccl_built(), "MPI": hvd.mpi_built()}
    mpi = horovod_rendezvous.mpi_library()
    try:
        choice = automatic_choice(LocalGroup(), Cluster(size=processes, local_size=processes, source="TF_CONFIG"))
        automatic = {"library": choice.library, "reason": choice.reason}
    except InputError as error:  # an environment variable is invalid
        automatic = {"library": "", "reason": str(error)}
    return {
        "libraries": [name for name, is_built in built.items() if is_built],
        "mpi_library": mpi,
        "starts_without_mpirun": not mpi or horovod_rendezvous.starts_without_mpirun(mpi),
        "automatic": automatic,
    }


if __name__ == "__main__":
    print(json.dumps(describe(int(sys.argv[1]))))
