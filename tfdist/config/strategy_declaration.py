"""Declaration of a strategy, read before it is loaded: processes, options, and the flag values that it refuses."""

import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import Any

from tfdist.cluster.environment import Cluster
from tfdist.sharding.mesh import parse_mesh


class Processes(enum.Enum):
    """The processes of a strategy's job."""

    ONE = "one process"
    SEVERAL = "one or several processes, of which the environment gives rank, size and the address of rank 0"
    ANY = "one or several processes; the strategy finds out what the environment does not give"


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A flag of which a strategy accepts one value only.

    Attributes:
      flag: name of the flag.
      accepted: the value.
      rule: why, and what to do instead, as a sentence.
    """

    flag: str
    accepted: Any
    rule: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmokeTest:
    """How `tfdist doctor` tests a strategy: a few steps on one machine.

    Attributes:
      processes: number of processes.
      options: values of the strategy's options.
      package: the Python package that it needs besides TensorFlow; empty if none.
      library: the library with which that package must have been built.
      install: the command that installs the package with the library.
    """

    processes: int = 1
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    package: str = ""
    library: str = ""
    install: str = ""

    @property
    def devices(self) -> int:
        """Number of devices of each process."""
        mesh = parse_mesh(self.options.get("mesh_shape", "model:1"))
        return int(self.options.get("devices", mesh.axes.get("model", 1)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Declaration:
    """What a strategy declares.

    Attributes:
      name: as in `--strategy`.
      help: where it runs, in a few words.
      processes: the processes of its job.
      options: names of the flags that its constructor takes; None if that is not known.
      refuses: flags of which it accepts one value only.
      accepts: for flags that several strategies take: the values that this one accepts.
      auto: called with this process's place in the job and its number of devices; returns whether `--strategy=auto`
        chooses this strategy; at most one may return True. None if it never does.
      check: called with a configuration; raises `InputError` if the strategy's options exclude each other.
      check_processes: called with a configuration and the number of processes; raises `InputError` if they do not suit each
        other.
      runs_keras_fit: whether Keras's own `fit` runs on it in any script, for which replicas must accept any number of
        rows, and models may be created outside of its scope.
      with_one_device: what to do if it is explicitly chosen but has one device only, as a sentence; empty if that is usual.
      adopts: names of the classes of tf.distribute whose objects, created by a program, it can use.
      smoke_tests: how it is tested on one machine; none if that takes special hardware.
    """

    name: str
    help: str = ""
    processes: Processes = Processes.ANY
    options: tuple[str, ...] | None = None
    refuses: tuple[Refusal, ...] = ()
    accepts: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    auto: Callable[[Cluster, int], bool] | None = None
    check: Callable[[Any], None] | None = None
    check_processes: Callable[[Any, int], object] | None = None
    runs_keras_fit: bool = True
    with_one_device: str = ""
    adopts: tuple[str, ...] = ()
    smoke_tests: tuple[SmokeTest, ...] = ()
