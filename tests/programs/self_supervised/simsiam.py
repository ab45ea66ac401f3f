"""Self-supervised contrastive learning with SimSiam."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, regularizers

SEED = 812
keras.utils.set_random_seed(SEED)

AUTO = tf.data.AUTOTUNE
BATCH_SIZE = 32
EPOCHS = 2
CROP_TO = 12
PROJECT_DIM = 16
LATENT_DIM = 8
WEIGHT_DECAY = 0.0005

# Load the data
patterns = np.random.uniform(0, 200, size=(5, CROP_TO, CROP_TO, 3))
labels = np.random.randint(0, 5, size=210)
images = (patterns[labels] + np.random.uniform(0, 55, size=(210, CROP_TO, CROP_TO, 3))).astype("uint8")
(x_train, y_train), (x_test, y_test) = (images[:170], labels[:170]), (images[170:], labels[170:])


# Defining our data augmentation pipeline
def flip_random_crop(image):
    # With random crops we also apply horizontal flipping.
    image = tf.image.random_flip_left_right(image)
    image = tf.pad(image, [[2, 2], [2, 2], [0, 0]], mode="REFLECT")
    return tf.image.random_crop(image, (CROP_TO, CROP_TO, 3))


def color_jitter(x, strength=(0.4, 0.4)):
    x = tf.image.random_brightness(x, max_delta=0.8 * strength[0])
    x = tf.image.random_contrast(x, lower=1 - 0.8 * strength[1], upper=1 + 0.8 * strength[1])
    return tf.clip_by_value(x, 0, 255)


def color_drop(x):
    x = tf.image.rgb_to_grayscale(x)
    return tf.tile(x, [1, 1, 3])


def random_apply(func, x, p):
    if tf.random.uniform([], minval=0, maxval=1) < p:
        return func(x)
    else:
        return x


def custom_augment(image):
    image = tf.cast(image, tf.float32)
    image = flip_random_crop(image)
    image = random_apply(color_jitter, image, p=0.8)
    image = random_apply(color_drop, image, p=0.2)
    return image


# Convert the data into TensorFlow `Dataset` objects: two versions of the same images, in the same order
ssl_ds_one = tf.data.Dataset.from_tensor_slices(x_train)
ssl_ds_one = ssl_ds_one.shuffle(1024, seed=SEED).map(custom_augment).batch(BATCH_SIZE).prefetch(AUTO)

ssl_ds_two = tf.data.Dataset.from_tensor_slices(x_train)
ssl_ds_two = ssl_ds_two.shuffle(1024, seed=SEED).map(custom_augment).batch(BATCH_SIZE).prefetch(AUTO)

# We then zip both of these datasets.
ssl_ds = tf.data.Dataset.zip((ssl_ds_one, ssl_ds_two))


def get_encoder():
    # Input and backbone.
    inputs = layers.Input((CROP_TO, CROP_TO, 3))
    x = layers.Rescaling(scale=1.0 / 127.5, offset=-1)(inputs)
    x = layers.Conv2D(8, 3, strides=2, padding="same", use_bias=False)(x)
    x = layers.BatchNormalization()(x)
    x = layers.ReLU()(x)
    x = layers.Conv2D(16, 3, strides=2, padding="same", activation="relu")(x)
    x = layers.GlobalAveragePooling2D(name="backbone_pool")(x)

    # Projection head.
    x = layers.Dense(PROJECT_DIM, use_bias=False, kernel_regularizer=regularizers.l2(WEIGHT_DECAY))(x)
    x = layers.BatchNormalization()(x)
    x = layers.ReLU()(x)
    x = layers.Dense(PROJECT_DIM, use_bias=False, kernel_regularizer=regularizers.l2(WEIGHT_DECAY))(x)
    outputs = layers.BatchNormalization()(x)
    return keras.Model(inputs, outputs, name="encoder")


def get_predictor():
    return keras.Sequential(
        [
            # Note the AutoEncoder-like structure.
            layers.Input((PROJECT_DIM,)),
            layers.Dense(LATENT_DIM, use_bias=False, kernel_regularizer=regularizers.l2(WEIGHT_DECAY)),
            layers.ReLU(),
            layers.BatchNormalization(),
            layers.Dense(PROJECT_DIM),
        ],
        name="predictor",
    )


def compute_loss(p, z):
    # The authors of SimSiam emphasize the impact of the `stop_gradient` operator.
    z = tf.stop_gradient(z)
    z = tf.math.l2_normalize(z, axis=1)
    p = tf.math.l2_normalize(p, axis=1)
    # Negative cosine similarity (minimizing this is equivalent to maximizing the similarity).
    return -tf.reduce_mean(tf.reduce_sum((p * z), axis=1))


class SimSiam(keras.Model):
    def __init__(self, encoder, predictor):
        super().__init__()
        self.encoder = encoder
        self.predictor = predictor
        self.loss_tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.loss_tracker]

    def train_step(self, data):
        # Unpack the data.
        ds_one, ds_two = data

        # Forward pass through the encoder and predictor.
        with tf.GradientTape() as tape:
            z1, z2 = self.encoder(ds_one, training=True), self.encoder(ds_two, training=True)
            p1, p2 = self.predictor(z1, training=True), self.predictor(z2, training=True)
            # Note that here we are enforcing the network to match
            # the representations of two differently augmented batches of data.
            loss = compute_loss(p1, z2) / 2 + compute_loss(p2, z1) / 2

        # Compute gradients and update the parameters.
        learnable_params = self.encoder.trainable_variables + self.predictor.trainable_variables
        gradients = tape.gradient(loss, learnable_params)
        self.optimizer.apply_gradients(zip(gradients, learnable_params))

        # Monitor loss.
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}


# Create a cosine decay learning scheduler.
num_training_samples = len(x_train)
steps = EPOCHS * (num_training_samples // BATCH_SIZE)
lr_decayed_fn = keras.optimizers.schedules.CosineDecay(initial_learning_rate=0.03, decay_steps=steps)

# Create an early stopping callback.
early_stopping = keras.callbacks.EarlyStopping(monitor="loss", patience=5, restore_best_weights=True)

# Compile model and start training.
simsiam = SimSiam(get_encoder(), get_predictor())
simsiam.compile(optimizer=keras.optimizers.SGD(lr_decayed_fn, momentum=0.6))
history = simsiam.fit(ssl_ds, epochs=EPOCHS, callbacks=[early_stopping])
print("SimSiam loss:", history.history["loss"])

# Linear evaluation: extract the backbone and train a classifier on its frozen features.
train_ds = tf.data.Dataset.from_tensor_slices((x_train, y_train)).shuffle(1024)
train_ds = train_ds.map(lambda x, y: (flip_random_crop(x), y)).batch(BATCH_SIZE).prefetch(AUTO)
test_ds = tf.data.Dataset.from_tensor_slices((x_test, y_test)).batch(BATCH_SIZE).prefetch(AUTO)

backbone = keras.Model(simsiam.encoder.input, simsiam.encoder.get_layer("backbone_pool").output)
backbone.trainable = False
inputs = layers.Input((CROP_TO, CROP_TO, 3))
x = backbone(inputs, training=False)
outputs = layers.Dense(5, activation="softmax")(x)
linear_model = keras.Model(inputs, outputs, name="linear_model")

linear_model.compile(
    loss="sparse_categorical_crossentropy",
    metrics=["accuracy"],
    optimizer=keras.optimizers.SGD(0.05, momentum=0.9),
)
linear_model.fit(train_ds, validation_data=test_ds, epochs=EPOCHS)
_, test_acc = linear_model.evaluate(test_ds)
print(f"Test accuracy: {test_acc * 100:.2f}%")
