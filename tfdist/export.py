"""Write the model of a run of tfdist.train, from its newest good checkpoint or a named one: .keras, SavedModel, safetensors."""

import dataclasses
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdist import command, flags, startup
from tfdist.config import WRITTEN, TrainConfig
from tfdist.errors import InputError
from tfdist.flag import check_fields, flag_field

if TYPE_CHECKING:
    from tfdist.trainer import Trainer

_ENDINGS = {"keras": ".keras", "saved_model": "", "safetensors": ".safetensors"}
# What is another matter on one device than where the run was.
_OF_ONE_DEVICE = ("devices", "communication", "coordinator", "mesh_shape", "layout", "shard", "shard_axis", "tpu")
_OF_TRAINING = ("compression", "compression_check_every", "compression_max_error", "jit_compile", "profile_steps")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """What is written, and where."""

    format: str = flag_field("keras", WRITTEN, "keras, saved_model or safetensors.", choices=tuple(_ENDINGS))
    output: str = flag_field("", WRITTEN, "A path that is not there yet; empty: in the run's folder, with the step.")
    data_dir: str | None = flag_field(
        None, WRITTEN, "Where the run's data set is, if it is not where the run found it."
    )

    def __post_init__(self) -> None:
        """Checks each field."""
        check_fields(self)


def main(run: str, config: ExportConfig) -> int:
    """Prints where the model was written."""
    startup.load_tensorflow()  # only now: flags are read, and help is printed, before
    from tfdist import session
    from tfdist.checkpoint import checkpoints_at

    found = checkpoints_at(run)
    trained = _flags(found, run)
    if config.data_dir:
        trained["data_dir"] = config.data_dir
    with session.opened(TrainConfig(**trained)) as opened:
        trainer = session.make_trainer(opened, opened.strategy)
        trainer.build(opened.data.train)
        trainer.resume_from([str(path) for path in found], sets_aside=False)
        name = f"export-{trainer.step:09d}{_ENDINGS[config.format]}"
        path = Path(config.output).expanduser() if config.output else _folder(found) / name
        _check_free(path, config.format)
        _write(trainer, config.format, path)
    print(f"{path}  step {trainer.step}, from {trainer.resumed_from}")
    return 0


def _flags(found: list[Path], run: str) -> dict[str, Any]:
    """The flags of the run, for one device."""
    from tfdist.restoring import first_readable

    if not found:
        raise InputError(
            f"A run has checkpoints if it was started with --checkpoint_every. Received: {run}, which has none. "
            "Give another run, or use its model.keras."
        )
    saved = first_readable(found)
    if not {"model", "dataset"} <= saved.flags.keys():
        raise InputError(
            "A run is exported by the flags that python -m tfdist.train keeps in its checkpoints. Received: "
            f"{saved.path}, which has none: a program made it. There, with its trainer built: trainer.resume({run!r}), then "
            "trainer.save('model.keras') or trainer.model.export('served')."
        )
    known = {field.name: field.default for field in dataclasses.fields(TrainConfig)}
    given = {name: value for name, value in saved.flags.items() if name in known}
    return {**given, **{name: known[name] for name in (*_OF_ONE_DEVICE, *_OF_TRAINING)}, "strategy": "single"}


def _folder(found: list[Path]) -> Path:
    """The run's, whether that, its checkpoints' or one checkpoint's path was given."""
    folder = found[0].parent
    return folder.parent if folder.name == "checkpoints" else folder


def _check_free(path: Path, kind: str) -> None:
    if path.exists() or path.suffix != _ENDINGS[kind]:
        ending = f" ending in {_ENDINGS[kind]}" if _ENDINGS[kind] else " without an ending"
        raise InputError(
            f"--output must be a path{ending} that is not there yet. Received: {path}. Give another --output."
        )
    path.parent.mkdir(parents=True, exist_ok=True)


def _write(trainer: "Trainer", kind: str, path: Path) -> None:
    """Writes beside the path, then renames: nobody finds the half of a model there."""
    write = {"keras": _keras, "saved_model": _saved_model, "safetensors": _safetensors}[kind]
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as beside:
        written = Path(beside) / path.name
        write(trainer, written)
        written.rename(path)


def _keras(trainer: "Trainer", path: Path) -> None:
    trainer.save(str(path))


def _saved_model(trainer: "Trainer", path: Path) -> None:
    trainer.model.export(str(path), format="tf_saved_model", verbose=False)


def _safetensors(trainer: "Trainer", path: Path) -> None:
    """Weights and moving statistics by Keras's paths."""
    import keras
    import numpy as np

    from tfdist import randomness
    from tfdist.checkpoint import Part, write_shard

    seeds = {id(state) for state in randomness.seed_states(trainer.model)}
    own = [v for v in trainer.model.variables if id(v) not in seeds]
    parts = [Part.whole(v.path, np.array(keras.ops.convert_to_numpy(v))) for v in own]
    [name] = write_shard(path.parent, 0, parts).shards
    (path.parent / name).rename(path)


def _run(values: Any, arguments: list[str]) -> int:
    remedy = "Give the folder of a run or of a checkpoint, behind the flags."
    return main(command.only(arguments, "The model of one run is written.", remedy), flags.config(values, ExportConfig))


if __name__ == "__main__":
    sys.exit(
        command.run(
            "export", lambda values: flags.define(values, ExportConfig), _run, about=__doc__ or "", arguments="RUN"
        )
    )
