"""Creates the callbacks of a run from its flags."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras

from tfdist.config.train_config import TrainConfig
from tfdist.errors import InputError
from tfdist.grammar.decay import Plateau
from tfdist.grammar.spec import load_object, parse
from tfdist.grammar.user_code import call_own
from tfdist.trainer.early_stopping import EarlyStopping
from tfdist.trainer.monitored import best_metric, check_monitored
from tfdist.trainer.plateau import ReduceLROnPlateau
from tfdist.trainer.trainer import Trainer


def make_callbacks(config: TrainConfig) -> list[keras.callbacks.Callback]:
    """Returns the callbacks of `--early_stopping`, `--decay=plateau` and `--callbacks`.

    Raises:
      InputError: the user's function fails, or returns something else.
    """
    monitor, decay = config.parsed.early_stopping, config.parsed.decay
    return [
        *([EarlyStopping(monitor.metric, mode=monitor.mode, **monitor.args)] if monitor else []),
        *([ReduceLROnPlateau(**dataclasses.asdict(decay))] if isinstance(decay, Plateau) else []),
        *_own(config.callbacks, config.output_dir),
    ]


def check_metrics(
    config: TrainConfig, callbacks: Sequence[keras.callbacks.Callback], trainer: Trainer, evaluates: bool
) -> None:
    """Checks the metrics of `--best`, `--early_stopping` and `--decay=plateau` before the run has a directory.

    Raises:
      InputError: the run does not measure one of them, or it is not known what is better.
    """
    check_monitored(callbacks, trainer.program, evaluates)
    if config.best:
        best_metric(config.best, trainer.program, evaluates)


def _own(text: str, output_dir: str) -> Sequence[Any]:
    """Returns what the user's function returns, as a list; it may take the directory of the run as `output_dir`."""
    if not text:
        return []
    spec = parse(text)
    found = call_own("--callbacks", load_object(spec.name), spec, output_dir=output_dir)
    made = found if isinstance(found, list | tuple) else [found]
    strange = next((each for each in made if not isinstance(each, keras.callbacks.Callback)), None)
    if strange is not None or found is None:
        raise InputError(
            f"--callbacks={text} must return a keras.callbacks.Callback or a list of them. Received: "
            f"{type(strange).__name__}. Return such objects."
        )
    return made
