"""Keras's `fit` with augmentation, a warmup, a rate that falls on a plateau, and validation on samples of every rank."""
# ruff: noqa: B905, UP031 - as such programs are written

import argparse

import keras
import numpy as np
from keras.layers import Conv2D, Dense, Dropout, Flatten, MaxPooling2D
from keras.models import Sequential

import tfdist.horovod as hvd

parser = argparse.ArgumentParser(description="Keras MNIST Example")
parser.add_argument("--batch-size", type=int, default=32, metavar="N")
parser.add_argument("--epochs", type=int, default=4, metavar="N")
parser.add_argument("--lr", type=float, default=4.0, metavar="LR")
args = parser.parse_args()

hvd.init()

batch_size, num_classes = args.batch_size, 10

# Images of 8 x 8 in place of MNIST: one bright pixel says which digit it is.
rng = np.random.default_rng(0)
y = rng.integers(0, num_classes, 768)
x = 0.3 * rng.random((768, 8, 8, 1)).astype("float32")
x[np.arange(768), y % 8, y // 8] = 1.0
(x_train, y_train), (x_test, y_test) = (x[:512], y[:512]), (x[512:], y[512:])
y_train = keras.utils.to_categorical(y_train, num_classes)
y_test = keras.utils.to_categorical(y_test, num_classes)

train_batches = len(x_train) // batch_size
test_batches = len(x_test) // batch_size

model = Sequential()
model.add(keras.Input((8, 8, 1)))
model.add(Conv2D(8, kernel_size=(3, 3), activation="relu"))
model.add(MaxPooling2D(pool_size=(2, 2)))
model.add(Dropout(0.1))
model.add(Flatten())
model.add(Dense(32, activation="relu"))
model.add(Dense(num_classes, activation="softmax"))

# The learning rate grows with the number of ranks.
scaled_lr = args.lr * hvd.size()
opt = keras.optimizers.Adadelta(scaled_lr)
opt = hvd.DistributedOptimizer(opt)

model.compile(loss=keras.losses.categorical_crossentropy, optimizer=opt, metrics=["accuracy"])

callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(warmup_epochs=2, initial_lr=scaled_lr, verbose=1),
    keras.callbacks.ReduceLROnPlateau(patience=10, verbose=1),
]

if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint("./checkpoint-{epoch}.keras"))


def flow(images, labels, augmented):
    """Batches for ever, in an order of this rank's own; images that are augmented are a little brighter or darker."""
    own = np.random.default_rng(hvd.rank())
    while True:
        rows = own.permutation(len(images))
        for start in range(0, len(images) - batch_size + 1, batch_size):
            batch = images[rows[start : start + batch_size]]
            if augmented:
                batch = batch * own.uniform(0.9, 1.1, (batch_size, 1, 1, 1)).astype("float32")
            yield batch, labels[rows[start : start + batch_size]]


# Every rank trains on 1 / N of the batches, and validates on 3 / N of them.
model.fit(
    flow(x_train, y_train, augmented=True),
    steps_per_epoch=train_batches // hvd.size(),
    callbacks=callbacks,
    epochs=args.epochs,
    verbose=1 if hvd.rank() == 0 else 0,
    validation_data=flow(x_test, y_test, augmented=False),
    validation_steps=3 * test_batches // hvd.size(),
)

score = model.evaluate(x_test, y_test, verbose=0)
print("Test loss:", score[0])
print("Test accuracy:", score[1])
