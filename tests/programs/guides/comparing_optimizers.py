"""Optimizers compared on one network: their variants, clipped gradients, schedules, and what callbacks do with each run."""

import keras
import numpy as np
from keras import layers, optimizers

keras.utils.set_random_seed(812)

EPOCHS, BATCH_SIZE = 3, 32

labels = np.random.randint(0, 3, size=260)
radius = np.random.uniform(0.1, 1, size=260)
angle = 4 * radius + 2 * np.pi / 3 * labels + np.random.normal(0, 0.2, size=260)
points = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
x_train, y_train, x_val, y_val = points[:200], labels[:200], points[200:], labels[200:]


class Perplexity(keras.metrics.Mean):
    def update_state(self, y_true, y_pred, sample_weight=None):
        losses = keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)
        return super().update_state(losses, sample_weight)

    def result(self):
        return keras.ops.exp(super().result())


def build_model():
    return keras.Sequential(
        [
            keras.Input(shape=(2,)),
            layers.Dense(16, activation="tanh", kernel_initializer=keras.initializers.Orthogonal(seed=1)),
            layers.Dense(16, activation="tanh"),
            layers.Dense(3),
        ]
    )


def adamw():
    optimizer = optimizers.AdamW(0.01, weight_decay=0.01, global_clipnorm=1.0)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


steps = EPOCHS * int(np.ceil(len(x_train) / BATCH_SIZE))
candidates = {
    "nesterov": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "clipped": lambda: optimizers.Adam(0.01, clipnorm=0.5),
    "adamw": adamw,
    "adamax": lambda: optimizers.Adamax(0.01),
    "nadam": lambda: optimizers.Nadam(0.01),
    "adafactor": lambda: optimizers.Adafactor(0.01),
    "cosine": lambda: optimizers.RMSprop(optimizers.schedules.CosineDecay(0.01, decay_steps=steps)),
}
for name, make_optimizer in candidates.items():
    keras.backend.clear_session()
    keras.utils.set_random_seed(812)
    model = build_model()
    model.compile(
        optimizer=make_optimizer(),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy", Perplexity(name="perplexity")],
        steps_per_execution=2,
    )
    callbacks = [
        keras.callbacks.TerminateOnNaN(),
        keras.callbacks.EarlyStopping(
            monitor="val_accuracy", mode="max", min_delta=0.001, patience=1, restore_best_weights=True
        ),
        keras.callbacks.ModelCheckpoint(f"{name}.keras", monitor="val_accuracy", mode="max", save_best_only=True),
        keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: print(epoch, logs["val_accuracy"])),
    ]
    history = model.fit(
        x_train,
        y_train,
        batch_size=BATCH_SIZE,
        epochs=EPOCHS,
        validation_data=(x_val, y_val),
        validation_batch_size=25,
        callbacks=callbacks,
        verbose=0,
    )
    print(name, history.history, model.evaluate(x_val, y_val, verbose=0))
