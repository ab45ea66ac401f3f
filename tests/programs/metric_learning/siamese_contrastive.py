"""A siamese network that compares pairs of images with a contrastive loss."""

import random

import keras
import numpy as np
from keras import ops

keras.utils.set_random_seed(812)

epochs = 3
batch_size = 16
margin = 1  # Margin for contrastive loss.


def load_digits(count):
    prototypes = np.random.default_rng(0).uniform(0, 255, size=(4, 12, 12))
    y = np.random.randint(0, 4, size=count)
    return prototypes[y] + np.random.normal(scale=30, size=(count, 12, 12)), y


(x_train_val, y_train_val), (x_test, y_test) = load_digits(160), load_digits(50)
x_train_val = x_train_val.astype("float32")
x_test = x_test.astype("float32")

x_train, x_val = x_train_val[:100], x_train_val[100:]
y_train, y_val = y_train_val[:100], y_train_val[100:]
del x_train_val, y_train_val


def make_pairs(x, y):
    """One matching and one non-matching pair for each image; the label is 0 for matching pairs."""
    num_classes = max(y) + 1
    digit_indices = [np.where(y == i)[0] for i in range(num_classes)]
    pairs = []
    labels = []
    for idx1 in range(len(x)):
        x1 = x[idx1]
        label1 = y[idx1]
        idx2 = random.choice(digit_indices[label1])
        x2 = x[idx2]
        pairs += [[x1, x2]]
        labels += [0]
        label2 = random.randint(0, num_classes - 1)
        while label2 == label1:
            label2 = random.randint(0, num_classes - 1)
        idx2 = random.choice(digit_indices[label2])
        x2 = x[idx2]
        pairs += [[x1, x2]]
        labels += [1]
    return np.array(pairs), np.array(labels).astype("float32")


pairs_train, labels_train = make_pairs(x_train, y_train)
pairs_val, labels_val = make_pairs(x_val, y_val)
pairs_test, labels_test = make_pairs(x_test, y_test)


def euclidean_distance(vects):
    x, y = vects
    sum_square = ops.sum(ops.square(x - y), axis=1, keepdims=True)
    return ops.sqrt(ops.maximum(sum_square, keras.backend.epsilon()))


input = keras.layers.Input((12, 12, 1))
x = keras.layers.BatchNormalization()(input)
x = keras.layers.Conv2D(4, (3, 3), activation="tanh")(x)
x = keras.layers.AveragePooling2D(pool_size=(2, 2))(x)
x = keras.layers.Conv2D(8, (3, 3), activation="tanh")(x)
x = keras.layers.AveragePooling2D(pool_size=(2, 2))(x)
x = keras.layers.Flatten()(x)

x = keras.layers.BatchNormalization()(x)
x = keras.layers.Dense(10, activation="tanh")(x)
embedding_network = keras.Model(input, x)

input_1 = keras.layers.Input((12, 12, 1))
input_2 = keras.layers.Input((12, 12, 1))

tower_1 = embedding_network(input_1)
tower_2 = embedding_network(input_2)

merge_layer = keras.layers.Lambda(euclidean_distance, output_shape=(1,))([tower_1, tower_2])
normal_layer = keras.layers.BatchNormalization()(merge_layer)
output_layer = keras.layers.Dense(1, activation="sigmoid")(normal_layer)
siamese = keras.Model(inputs=[input_1, input_2], outputs=output_layer)


def loss(margin=1):
    """Provides 'contrastive_loss' an enclosing scope with variable 'margin'."""

    def contrastive_loss(y_true, y_pred):
        square_pred = ops.square(y_pred)
        margin_square = ops.square(ops.maximum(margin - (y_pred), 0))
        return ops.mean((1 - y_true) * square_pred + (y_true) * margin_square)

    return contrastive_loss


siamese.compile(loss=loss(margin=margin), optimizer="RMSprop", metrics=["accuracy"])
siamese.summary()

siamese.fit(
    [pairs_train[:, 0], pairs_train[:, 1]],
    labels_train,
    validation_data=([pairs_val[:, 0], pairs_val[:, 1]], labels_val),
    batch_size=batch_size,
    epochs=epochs,
)
results = siamese.evaluate([pairs_test[:, 0], pairs_test[:, 1]], labels_test)
predictions = siamese.predict([pairs_test[:, 0], pairs_test[:, 1]])
