"""Custom callbacks: printed progress, early stopping at the minimum loss, a learning rate schedule."""

import keras
import numpy as np

keras.utils.set_random_seed(812)


def get_model():
    model = keras.Sequential()
    model.add(keras.layers.Dense(1))
    model.compile(
        optimizer=keras.optimizers.RMSprop(learning_rate=0.1),
        loss="mean_squared_error",
        metrics=["mean_absolute_error"],
    )
    return model


x_train = np.random.random((200, 8, 8)).reshape(-1, 64).astype("float32")
x_test = np.random.random((200, 8, 8)).reshape(-1, 64).astype("float32")
y_train = x_train[:, :10].sum(axis=1) + 0.1 * np.random.normal(size=200)
y_test = x_test[:, :10].sum(axis=1) + 0.1 * np.random.normal(size=200)


class CustomCallback(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        print(f"Starting training; got log keys: {list(logs.keys())}")

    def on_predict_batch_end(self, batch, logs=None):
        print(f"...Predicting: end of batch {batch}; got log keys: {list(logs.keys())}")


class LossAndErrorPrintingCallback(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        print(f"Up to batch {batch}, the average loss is {logs['loss']:7.2f}.")

    def on_test_batch_end(self, batch, logs=None):
        print(f"Up to batch {batch}, the average loss is {logs['loss']:7.2f}.")

    def on_epoch_end(self, epoch, logs=None):
        print(
            f"The average loss for epoch {epoch} is {logs['loss']:7.2f} "
            f"and mean absolute error is {logs['mean_absolute_error']:7.2f}."
        )


class EarlyStoppingAtMinLoss(keras.callbacks.Callback):
    """Stop training when the loss is at its min, i.e. the loss stops decreasing."""

    def __init__(self, patience=0):
        super().__init__()
        self.patience = patience
        self.best_weights = None

    def on_train_begin(self, logs=None):
        self.wait = 0
        self.best = np.inf

    def on_epoch_end(self, epoch, logs=None):
        current = logs.get("loss")
        if np.less(current, self.best):
            self.best = current
            self.wait = 0
            self.best_weights = self.model.get_weights()
        else:
            self.wait += 1
            if self.wait >= self.patience:
                self.model.stop_training = True

    def on_train_end(self, logs=None):
        self.model.set_weights(self.best_weights)


class CustomLearningRateScheduler(keras.callbacks.Callback):
    """Learning rate scheduler which sets the learning rate according to schedule."""

    def __init__(self, schedule):
        super().__init__()
        self.schedule = schedule

    def on_epoch_begin(self, epoch, logs=None):
        lr = self.model.optimizer.learning_rate
        scheduled_lr = self.schedule(epoch, lr)
        self.model.optimizer.learning_rate = scheduled_lr


LR_SCHEDULE = [(1, 0.05), (2, 0.01), (3, 0.005)]


def lr_schedule(epoch, lr):
    """Helper function to retrieve the scheduled learning rate based on epoch."""
    if epoch < LR_SCHEDULE[0][0] or epoch > LR_SCHEDULE[-1][0]:
        return lr
    for start, rate in LR_SCHEDULE:
        if epoch == start:
            return rate
    return lr


model = get_model()
model.fit(
    x_train,
    y_train,
    batch_size=64,
    epochs=1,
    verbose=0,
    validation_split=0.5,
    callbacks=[CustomCallback(), LossAndErrorPrintingCallback()],
)
res = model.evaluate(x_test, y_test, batch_size=128, verbose=0, callbacks=[LossAndErrorPrintingCallback()])
model.predict(x_test, batch_size=128, verbose=0, callbacks=[CustomCallback()])

for own_callback in (EarlyStoppingAtMinLoss(), CustomLearningRateScheduler(lr_schedule)):
    model = get_model()
    callbacks = [LossAndErrorPrintingCallback(), own_callback]
    history = model.fit(x_train, y_train, batch_size=64, epochs=5, verbose=0, callbacks=callbacks)
    print("Epochs run:", len(history.history["loss"]), model.evaluate(x_test, y_test, verbose=0))
