"""Train a Keras model with the strategy chosen by flags or the environment."""

import contextlib
import os
import sys

from tfdist.cli import command
from tfdist.cli.output import TEXT, Output
from tfdist.cluster.tf_config import is_evaluator
from tfdist.config.train_config import TrainConfig
from tfdist.errors import InputError


def main(config: TrainConfig, output: Output = TEXT) -> int:
    """Trains a model as described by the flags; returns the exit code."""
    if output.is_json and not config.dry_run:
        raise InputError(
            "--json requires --dry_run. Received: --json alone. Add --dry_run, or read the metrics.jsonl that a run writes."
        )
    if is_evaluator(os.environ.get("TF_CONFIG", "")):
        from tfdist.cli import evaluator

        return evaluator.main(config)
    # Imported late, to print help without delay.
    from tfdist.checkpoint import in_memory
    from tfdist.cli import early_checks, resume, search
    from tfdist.cluster.quiet_tensorflow import load_tensorflow
    from tfdist.cluster.terminal import show_temporarily
    from tfdist.reporting.loggers import check_installed

    context = early_checks.detect_context(config)
    early_checks.check_data(config, context)
    if config.find:
        return search.run(config, context)
    check_installed(config.parsed.loggers)
    in_memory.required_parent(config.commit_every, config.commit_dir)  # reports an invalid directory early
    context = early_checks.check_cluster(config, context)
    decision = resume.decide_start_early(config, context)
    if decision and decision[0] and not config.dry_run:
        print(decision[0])
        return 0
    seconds = load_tensorflow()  # imported late, after parsing flags
    from tfdist.cli import run
    from tfdist.trainer.data_warnings import check_examples
    from tfdist.trainer.early_stopping import check_monitored_metrics
    from tfdist.trainer.options import Checks, Schedule

    with run.open_session(config, context) as session:
        session = run.with_clients(session)
        run_config, origin, message = run.choose_directory_and_origin(
            session, decision
        )  # before the model is built, because it may raise
        if message and not config.dry_run:
            if session.strategy.is_chief:
                print(message)
            return 0
        callbacks = run.make_callbacks(run_config)
        with show_temporarily("Building the model ...") if session.strategy.is_chief else contextlib.nullcontext():
            trainer = run.make_trainer(session, session.strategy)
            program = trainer.build(session.data.train)
        check_monitored_metrics(callbacks, config.best, program, session.data.test is not None)
        # Reports invalid data before the directory is created; `fit` logs the warnings.
        examples, options = (session.data.train, session.data.test), (program.settings, program.dependence)
        findings = check_examples(session.strategy, trainer.model, *examples, *options)
        if config.dry_run:
            run.describe(session, trainer, output)
            return 0
        with run.open_run(session, run_config, origin, trainer, findings, seconds) as active_run:
            trainer.fit(
                session.data,
                batch_size=config.batch_size,
                epochs=config.epochs or None,
                steps=config.steps or None,
                callbacks=callbacks,
                schedule=Schedule.from_config(config),
                checks=Checks.from_config(config),
                reporting=active_run.reporting,
                checkpoints=active_run.checkpoints,
            )
            best = active_run.finish(trainer, config, callbacks)
    active_run.print_summary(best, config)
    return 0


_EXAMPLES = (
    "tfdist train --strategy=mirrored --devices=2 --model=mlp --epochs=2 --checkpoint_every=20 --output_dir=runs/one",
    "tfdist train --flagfile=runs/one/flags.txt --optimizer='sgd(momentum=0.9)' --learning_rate=0.1",
)

if __name__ == "__main__":
    sys.exit(command.run("train", TrainConfig, main, about=__doc__, has_json=True, examples=_EXAMPLES))
