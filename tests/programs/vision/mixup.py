"""MixUp augmentation for image classification."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from tensorflow import data as tf_data

keras.utils.set_random_seed(812)

AUTO = tf_data.AUTOTUNE
BATCH_SIZE = 32
EPOCHS = 3

# ## Prepare the dataset

patterns = np.random.uniform(0, 200, size=(10, 12, 12))
y = np.random.randint(0, 10, size=250)
x = patterns[y] + np.random.uniform(0, 55, size=(250, 12, 12))
(x_train, y_train), (x_test, y_test) = (x[:200], y[:200]), (x[200:], y[200:])

x_train = x_train.astype("float32") / 255.0
x_train = np.reshape(x_train, (-1, 12, 12, 1))
y_train = keras.utils.to_categorical(y_train, 10)

x_test = x_test.astype("float32") / 255.0
x_test = np.reshape(x_test, (-1, 12, 12, 1))
y_test = keras.utils.to_categorical(y_test, 10)

# Put aside a few samples to create our validation set
val_samples = 40
x_val, y_val = x_train[:val_samples], y_train[:val_samples]
new_x_train, new_y_train = x_train[val_samples:], y_train[val_samples:]

train_ds_one = (
    tf_data.Dataset.from_tensor_slices((new_x_train, new_y_train)).shuffle(BATCH_SIZE * 100).batch(BATCH_SIZE)
)
train_ds_two = (
    tf_data.Dataset.from_tensor_slices((new_x_train, new_y_train)).shuffle(BATCH_SIZE * 100).batch(BATCH_SIZE)
)
# Because we will be mixing up the images and their corresponding labels, we will be
# combining two shuffled datasets from the same training data.
train_ds = tf_data.Dataset.zip((train_ds_one, train_ds_two))

val_ds = tf_data.Dataset.from_tensor_slices((x_val, y_val)).batch(BATCH_SIZE)
test_ds = tf_data.Dataset.from_tensor_slices((x_test, y_test)).batch(BATCH_SIZE)


# ## Define the mixup technique function


def sample_beta_distribution(size, concentration_0=0.2, concentration_1=0.2):
    gamma_1_sample = tf.random.gamma(shape=[size], alpha=concentration_1)
    gamma_2_sample = tf.random.gamma(shape=[size], alpha=concentration_0)
    return gamma_1_sample / (gamma_1_sample + gamma_2_sample)


def mix_up(ds_one, ds_two, alpha=0.2):
    # Unpack two datasets
    images_one, labels_one = ds_one
    images_two, labels_two = ds_two
    batch_size = tf.shape(images_one)[0]

    # Sample lambda and reshape it to do the mixup
    lam = sample_beta_distribution(batch_size, alpha, alpha)
    x_l = tf.reshape(lam, (batch_size, 1, 1, 1))
    y_l = tf.reshape(lam, (batch_size, 1))

    # Perform mixup on both images and labels
    images = images_one * x_l + images_two * (1 - x_l)
    labels = labels_one * tf.cast(y_l, labels_one.dtype) + labels_two * tf.cast(1 - y_l, labels_two.dtype)
    return images, labels


train_ds_mu = train_ds.map(lambda ds_one, ds_two: mix_up(ds_one, ds_two, alpha=0.2)).prefetch(AUTO)


# ## Model building


def get_training_model():
    return keras.Sequential(
        [
            layers.Input((12, 12, 1)),
            layers.Conv2D(8, (3, 3), strides=(2, 2), padding="same", activation="relu"),
            layers.Conv2D(16, (3, 3), padding="same", activation="relu"),
            layers.MaxPooling2D((2, 2)),
            layers.Dropout(0.2),
            layers.GlobalAveragePooling2D(),
            layers.Dense(16, activation="relu"),
            layers.Dense(10, activation="softmax"),
        ]
    )


# For reproducibility, we serialize the initial random weights of our network.
initial_model = get_training_model()
initial_model.save_weights("initial_weights.weights.h5")

# ## 1. Train the model with the mixed up dataset

model = get_training_model()
model.load_weights("initial_weights.weights.h5")
model.compile(loss=keras.losses.CategoricalCrossentropy(), optimizer="adam", metrics=["accuracy"])
history = model.fit(train_ds_mu, validation_data=val_ds, epochs=EPOCHS)
_, test_acc = model.evaluate(test_ds)
print(f"Test accuracy: {test_acc * 100:.2f}%")

# ## 2. Train the model *without* the mixed up dataset

model = get_training_model()
model.load_weights("initial_weights.weights.h5")
model.compile(loss="categorical_crossentropy", optimizer="adam", metrics=["accuracy"])
# Notice that we are NOT using the mixed up dataset here
history = model.fit(train_ds_one, validation_data=val_ds, epochs=EPOCHS)
_, test_acc = model.evaluate(test_ds)
print(f"Test accuracy: {test_acc * 100:.2f}%")
