"""A classifier trained batch by batch with train_on_batch."""

import keras
import numpy as np
from keras import layers


def load_data():
    rng = np.random.default_rng(0)
    prototypes = rng.normal(size=(4, 12))
    labels = rng.integers(4, size=250)
    features = prototypes[labels] + rng.normal(scale=0.8, size=(250, 12))
    features = features.astype("float32")
    return (features[:200], labels[:200]), (features[200:], labels[200:])


def build_model():
    model = keras.models.Sequential()
    model.add(keras.Input(shape=(12,)))
    model.add(layers.Dense(16))
    model.add(layers.BatchNormalization())
    model.add(layers.Activation("relu"))
    model.add(layers.Dropout(0.25))
    model.add(layers.Dense(4, activation="softmax"))
    model.compile(
        loss="categorical_crossentropy",
        optimizer=keras.optimizers.SGD(learning_rate=0.05, momentum=0.9),
        metrics=["accuracy"],
    )
    return model


def batches(x, y, batch_size):
    indices = np.random.permutation(len(x))
    for start in range(0, len(x), batch_size):
        rows = indices[start : start + batch_size]
        yield x[rows], y[rows]


def main():
    keras.utils.set_random_seed(812)
    (x_train, y_train), (x_test, y_test) = load_data()
    y_train = keras.utils.to_categorical(y_train, 4)
    y_test = keras.utils.to_categorical(y_test, 4)
    model = build_model()
    model.summary()
    print("Metrics:", model.metrics_names)
    nb_epoch = 3
    batch_size = 32
    best = np.inf
    for epoch in range(nb_epoch):
        if epoch > 0:
            model.optimizer.learning_rate = 0.05 * 0.5**epoch
        model.reset_metrics()
        for x_batch, y_batch in batches(x_train, y_train, batch_size):
            model.train_on_batch(x_batch, y_batch)
        model.reset_metrics()
        for start in range(0, len(x_test), batch_size):
            test_loss, test_accuracy = model.test_on_batch(
                x_test[start : start + batch_size], y_test[start : start + batch_size]
            )
        if test_loss < best:
            best = test_loss
            model.save_weights("best.weights.h5")
    model = build_model()
    model.load_weights("best.weights.h5")
    model.train_on_batch(x_train[:40], y_train[:40], sample_weight=np.linspace(0.5, 1.5, 40), return_dict=True)
    for rows in (x_test[:25], x_test[25:]):
        model.predict_on_batch(rows)
    print("Last evaluation:", model.test_on_batch(x_test, y_test, return_dict=True))


if __name__ == "__main__":
    main()
