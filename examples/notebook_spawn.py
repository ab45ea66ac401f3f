"""Training on several processes from a notebook: each part between two lines of `# %%` is a cell.

    python examples/notebook_spawn.py [EPOCHS]

The processes are new ones, which end with the call. So the notebook's own TensorFlow, if it has one, does not matter, and a
training that crashes or runs out of memory leaves the notebook as it was. What a process prints appears here behind its
rank; what the function returns comes back as a list, by rank. A function that a cell defines travels by value, which needs
the package cloudpickle.
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
