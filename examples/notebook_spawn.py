"""Training on several processes from a notebook: each part that starts with `# %%` is a cell.

    python examples/notebook_spawn.py [EPOCHS]

Each call starts new processes, which end with it. The notebook may therefore use TensorFlow itself, and a run that crashes or
exhausts memory does not affect the notebook. The output of each process is printed with its rank as a prefix, and the return
values of the function are returned as a list, by rank. A function defined in a cell is pickled by value, which requires the
package cloudpickle.
"""

# %%
import sys

import tfdist

EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 and sys.argv[1].isdigit() else 5


# %%
def accuracy(learning_rate, epochs):
    """Trains on all processes of the job; runs in each of them."""
    import keras

    import tfdist

    keras.utils.set_random_seed(0)
    strategy = tfdist.load_strategy("auto")
    digits = tfdist.data.load("digits")
    with strategy.scope():
        trainer = tfdist.Trainer(
            tfdist.models.build("mlp", digits.input_shape, digits.classes),
            optimizer=keras.optimizers.SGD(learning_rate),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    trainer.fit(digits.train, batch_size=64, epochs=epochs)
    result = trainer.evaluate(digits.test, batch_size=64)
    strategy.group.leave()
    strategy.close()
    return result["accuracy"]


# %%
for rate in (0.01, 0.1):
    values = tfdist.spawn(accuracy, processes=2, args=(rate, EPOCHS))
    print(f"learning rate {rate}: accuracy on each rank {[round(value, 3) for value in values]}")
