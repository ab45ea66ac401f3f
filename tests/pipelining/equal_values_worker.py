"""Builds a model without a seed on a pipeline, saves it, and prints this process's weights before and after a step as JSON.

python -m tests.pipelining.equal_values_worker FILE
"""

import json
import sys

import keras
import numpy as np

import tfdist


def weights(trainer: tfdist.Trainer) -> dict[str, list]:
    return {variable.path: np.asarray(variable).tolist() for variable in trainer.model.trainable_variables}


def main(path: str) -> None:
    strategy = tfdist.load_strategy("pipeline", mesh_shape="stage:2;data:2", micro_batches=2)
    keras.utils.set_random_seed(strategy.cluster.rank)  # as processes without a seed
    with strategy.scope():
        tokens = keras.Input((4,), dtype="int32")
        table = keras.layers.ReversibleEmbedding(8, 4, tie_weights=True, name="table")
        hidden = keras.layers.Dropout(0.5)(keras.layers.Dense(4, name="hidden")(table(tokens)))
        model = keras.Model(tokens, table(keras.layers.Dense(4, name="last")(hidden), reverse=True))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        trainer = tfdist.Trainer(model, optimizer="sgd", loss=loss)
    x = np.arange(32, dtype="int32").reshape(8, 4) % 8
    trainer.build((x, x))
    before = weights(trainer)
    trainer.fit(x, x, batch_size=8, steps=1, verbose=0)
    trainer.save(path)
    trainer.fit(x, x, batch_size=8, steps=1, verbose=0)  # the states of random layers are still there
    try:
        other = "" if strategy.pipeline_rank else str(np.asarray(model.get_layer("last").kernel))
    except tfdist.errors.InputError as error:
        other = str(error)
    print(json.dumps({"before": before, "after": weights(trainer), "other": other}), flush=True)
    strategy.group.barrier("end")
    strategy.close()


if __name__ == "__main__":
    main(sys.argv[1])
