"""A training of a case, in a pipeline or on one device: what tests of pipelines compare."""

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import keras
import numpy as np

import tfdist
from tests.strategies.pipeline_models import CUTS, MODELS, Made
from tfdist import keras_internals
from tfdist.config.spec import parse
from tfdist.gradients import Clip, LossScale
from tfdist.pipelining.schedule import Schedule
from tfdist.pipelining.schedule_catalog import make_schedule

STEPS, PREDICTED, EVALUATED = 20, 21, 50
OPTIMIZERS: Mapping[str, Callable[[], keras.Optimizer]] = {
    "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "adamw": lambda: keras.optimizers.AdamW(0.003, weight_decay=0.01),
    "gradients": lambda: keras.optimizers.SGD(1.0),
}
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "": {},
    "clip": {"clip": Clip(norm=0.3)},
    "loss_scale": {"loss_scale": LossScale(initial=2.0**10, growth_interval=5)},
    "recompute": {},
    "ema": {"ema": 0.8},
    "check_sync": {},
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A training whose result does not depend on how it is computed."""

    model: str  # a key of `MODELS`, with arguments
    optimizer: str = "sgd"
    schedule: str = "1f1b"  # as in `--pipeline_schedule`, or "reversed" for reversed forward passes
    micro_batches: int = 4
    options: str = ""
    fault: str = ""
    steps: int = STEPS

    def __str__(self) -> str:
        parts = (self.model, self.optimizer, self.schedule, f"m{self.micro_batches}", self.options, self.fault)
        return "-".join(filter(None, parts))

    @property
    def batch_size(self) -> int:
        """Rows of a step, which divide into micro-batches on one or two replicas."""
        return 24 if self.micro_batches % 3 == 0 else 16

    @property
    def trained_config(self) -> "Case":
        """What a single device computes."""
        options = "" if self.options in ("recompute", "check_sync") else self.options
        count = 6 if self.batch_size == 24 else 1
        return dataclasses.replace(self, schedule="1f1b", micro_batches=count, options=options, fault="")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a case in one process."""

    variables: dict[str, np.ndarray]  # this process's weights, and the slots of their optimizer, by path
    records: list[dict[str, float]]  # numbers of each report of the training
    evaluation: dict[str, float]  # of some examples, the last batch of which is smaller
    predictions: list[np.ndarray]
    digest: str  # of the variables


def make_trainer(strategy: tfdist.Strategy, case: Case) -> tuple[tfdist.Trainer, Made]:
    """Returns a trainer with weights that depend only on the case, and what it was made of."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(7)
    if strategy.name == "pipeline":
        strategy.schedule = schedule_of(case, strategy.grid.stages)
        strategy.cut = CUTS.get(case.model, {}).get(strategy.schedule.stages, "auto")
    with strategy.scope():
        model = parse(case.model)
        made = MODELS[model.name](**model.args)
        tfdist.recompute(made.model, "full" if case.options == "recompute" else "none")
        options = {**made.options, **OPTIONS[case.options]}
        return tfdist.Trainer(made.model, optimizer=OPTIMIZERS[case.optimizer](), seed=3, **options), made


def schedule_of(case: Case, processes: int) -> Schedule:
    if case.schedule != "reversed":
        return make_schedule(case.schedule, processes, case.micro_batches)
    schedule, count = make_schedule("gpipe", processes, case.micro_batches), case.micro_batches
    rows = tuple((*reversed(row[:count]), *row[count:]) for row in schedule.actions)
    return dataclasses.replace(schedule, name="reversed", actions=rows)


def fit(trainer: tfdist.Trainer, made: Made, case: Case, **options: Any) -> Any:
    return trainer.fit(
        made.x,
        made.y,
        sample_weight=made.weight,
        batch_size=case.batch_size,
        **{"steps": case.steps, **options},
        schedule=tfdist.Schedule(log_every=5, steps_per_call=5),
        checks=tfdist.Checks(check_sync_every=4 if case.options == "check_sync" else 0),
        verbose=0,
    )


def run_case(strategy: tfdist.Strategy, case: Case) -> Outcome:
    with FAULTS[case.fault]():
        trainer, made = make_trainer(strategy, case)
        history = fit(trainer, made, case)
    return outcome_of(trainer, made, history.records)


def outcome_of(trainer: tfdist.Trainer, made: Made, all_records: Sequence[Mapping[str, Any]]) -> Outcome:
    """Evaluates and predicts; see `Outcome`."""
    weight = None if made.weight is None else made.weight[:EVALUATED]
    evaluation = trainer.evaluate(
        _first(made.x, EVALUATED), _first(made.y, EVALUATED), sample_weight=weight, batch_size=16
    )
    predictions = trainer.predict(_first(made.x, PREDICTED), batch_size=8, verbose=0)
    numbers = {"loss", "accuracy", "skipped_steps", "loss_scale", *trainer.model.metrics_names}
    records = [{name: record[name] for name in numbers if name in record} for record in all_records]
    variables = values(trainer)
    return Outcome(variables, records, evaluation, keras.tree.flatten(predictions), digest_of(variables))


def _first(arrays: Any, count: int) -> Any:
    return keras.tree.map_structure(lambda array: array[:count], arrays)


def values(trainer: tfdist.Trainer) -> dict[str, np.ndarray]:
    """Returns the values of a process's variables by path, with those of the optimizer."""
    optimizer = trainer.model.optimizer
    variables = [*trainer.model.variables, *getattr(optimizer, "inner_optimizer", optimizer).variables]
    found = {v.path: np.asarray(keras_internals.value_of(v)) for v in variables}
    return {path: value for path, value in found.items() if "seed_generator" not in path}


def digest_of(variables: Mapping[str, np.ndarray]) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(value).tobytes() for value in variables.values())).hexdigest()


@contextlib.contextmanager
def _labels_of_the_next_micro_batch() -> Iterator[None]:
    from tfdist.step import pipelined_step

    split = pipelined_step.split_rows

    def shifted(batch: Any, micro_batches: int) -> list[Any]:
        parts = split(batch, micro_batches)
        return [(x, *after[1:]) for (x, *_), after in zip(parts, [*parts[1:], parts[0]], strict=True)]

    with mock.patch.object(pipelined_step, "split_rows", shifted):
        yield


def _gradients_of_shared_variables_are_not_summed() -> Any:
    return mock.patch("tfdist.step.pipelined_step.sum_over_stages", lambda gradients, *_: list(gradients))


FAULTS: Mapping[str, Callable[[], Any]] = {
    "": contextlib.nullcontext,
    "labels": _labels_of_the_next_micro_batch,
    "tied": _gradients_of_shared_variables_are_not_summed,
}
