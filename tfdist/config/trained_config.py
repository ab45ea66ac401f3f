"""The configuration of commands that run a trained model: evaluate and predict."""

import dataclasses
import os

from tfdist.config.conflicts import check_combinations
from tfdist.config.fields import check_fields, check_flag, field_names, model_flag, output_flag
from tfdist.config.spec import parse
from tfdist.config.strategy_registry import JobOptions, TrainerOptions
from tfdist.errors import InputError

NEWEST, BEST = "newest", "best"
TABLES = (".npy", ".npz", ".csv")


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightsConfig:
    """The weights to use, and whether user code that the run names may be executed."""

    checkpoint: str = model_flag(
        NEWEST,
        "Weights: newest (checkpoint, or model.keras without checkpoints), best (if the run has kept it), or the path of a "
        "checkpoint or of a .keras file.",
    )
    data_dir: str | None = model_flag(
        None, "Directory with the files of the dataset, if it has moved since the run.", per_process=True
    )
    safe_mode: bool = check_flag(
        True,
        "Raise an error for a run whose model, dataset, loss, optimizer or decay is a package.module:function, or whose data "
        "set is tfds:NAME, instead of importing it.",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedConfig(WeightsConfig, TrainerOptions, JobOptions):
    """The weights, data and devices of a command; by default, the same as in the run."""

    dataset: str = model_flag("", "Dataset, as for training. Defaults to the run's dataset.", parse=parse)
    split: str = model_flag("test", "Split of the dataset: test or train.", choices=("test", "train"))
    batch_size: int = model_flag(
        0, "Number of examples per batch, over all replicas. Does not affect the result. 0 means the run's batch size."
    )

    def __post_init__(self) -> None:
        check_fields(self)
        check_combinations(self)

    @property
    def options(self) -> dict[str, object]:
        """The flags of the strategy and the control plane, by name."""
        names = ("strategy", "coordinator", "token_file", "insecure", "start_timeout_seconds")
        return {name: getattr(self, name) for name in (*names, *field_names(self, "is_option"))}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateConfig(TrainedConfig):
    """Configuration of `tfdist evaluate`."""

    output: str = output_flag("", "File to write the results to, as JSON. By default, they are only printed.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictConfig(TrainedConfig):
    """Configuration of `tfdist predict`."""

    output: str = output_flag(
        "",
        "File to write the predictions to, one row per example, in the order of the dataset: .npy, .npz or .csv. "
        "Defaults to predictions-STEP.npy in the directory of the run.",
    )
    classes: bool = output_flag(False, "Write the index of the largest output of each example, instead of all outputs.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.output and os.path.splitext(self.output)[1] not in TABLES:
            raise InputError(f"--output must end in {', '.join(TABLES)}. Received: {self.output}.")
