"""Masked image modeling with a small masked autoencoder."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

SEED = 812
keras.utils.set_random_seed(SEED)

# DATA
BUFFER_SIZE = 1024
BATCH_SIZE = 32
AUTO = tf.data.AUTOTUNE
IMAGE_SIZE = 12
# OPTIMIZER
LEARNING_RATE = 5e-3
WEIGHT_DECAY = 1e-4
# PRETRAINING
EPOCHS = 2
# PATCHES AND MASKING
PATCH_SIZE = 4
NUM_PATCHES = (IMAGE_SIZE // PATCH_SIZE) ** 2
MASK_PROPORTION = 0.7
# ENCODER and DECODER
LAYER_NORM_EPS = 1e-6
PROJECTION_DIM = 16
NUM_HEADS = 2

rng = np.random.default_rng(0)
rows, cols = np.mgrid[0:IMAGE_SIZE, 0:IMAGE_SIZE]
waves = rng.uniform(0.2, 0.8, size=(200, 2, 1, 1))
images = np.sin(waves[:, 0] * rows + waves[:, 1] * cols)[..., None] * rng.uniform(0.3, 1, size=(200, 1, 1, 3))
images = (127.5 * (images + 1)).astype("float32")
x_train, x_val, x_test = images[:140], images[140:170], images[170:]

train_ds = tf.data.Dataset.from_tensor_slices(x_train).shuffle(BUFFER_SIZE).batch(BATCH_SIZE).prefetch(AUTO)
val_ds = tf.data.Dataset.from_tensor_slices(x_val).batch(BATCH_SIZE).prefetch(AUTO)
test_ds = tf.data.Dataset.from_tensor_slices(x_test).batch(BATCH_SIZE).prefetch(AUTO)


class Patches(layers.Layer):
    def __init__(self, patch_size=PATCH_SIZE, **kwargs):
        super().__init__(**kwargs)
        self.patch_size = patch_size
        # Assuming the image has three channels each patch would be of size (patch_size, patch_size, 3).
        self.resize = layers.Reshape((-1, patch_size * patch_size * 3))

    def call(self, images):
        return self.resize(ops.image.extract_patches(images, size=self.patch_size))


class PatchEncoder(layers.Layer):
    """Projects the patches, adds their positions, and hides a random part of them."""

    def __init__(self, projection_dim=PROJECTION_DIM, mask_proportion=MASK_PROPORTION, **kwargs):
        super().__init__(**kwargs)
        self.projection_dim = projection_dim
        self.mask_proportion = mask_proportion
        self.seed_generator = keras.random.SeedGenerator(SEED)

    def build(self, input_shape):
        _, self.num_patches, self.patch_area = input_shape
        # This is a trainable mask token initialized randomly from a normal distribution.
        self.mask_token = self.add_weight(shape=(1, self.patch_area), initializer="random_normal", name="mask_token")
        self.projection = layers.Dense(units=self.projection_dim)
        self.projection.build(input_shape)
        self.position_embedding = layers.Embedding(input_dim=self.num_patches, output_dim=self.projection_dim)
        self.position_embedding.build((None, self.num_patches))
        # Number of patches that will be masked.
        self.num_mask = int(self.mask_proportion * self.num_patches)

    def call(self, patches):
        batch_size = ops.shape(patches)[0]
        positions = self.position_embedding(ops.arange(self.num_patches)[None])
        position_embeddings = ops.tile(positions, [batch_size, 1, 1])
        patch_embeddings = self.projection(patches) + position_embeddings

        mask_indices, unmask_indices = self.get_random_indices(batch_size)
        unmasked_embeddings = tf.gather(patch_embeddings, unmask_indices, axis=1, batch_dims=1)
        unmasked_positions = tf.gather(position_embeddings, unmask_indices, axis=1, batch_dims=1)
        masked_positions = tf.gather(position_embeddings, mask_indices, axis=1, batch_dims=1)
        # Repeat the mask token number of mask times.
        mask_tokens = ops.tile(ops.repeat(self.mask_token, self.num_mask, axis=0)[None], [batch_size, 1, 1])
        masked_embeddings = self.projection(mask_tokens) + masked_positions
        return unmasked_embeddings, masked_embeddings, unmasked_positions, mask_indices, unmask_indices

    def get_random_indices(self, batch_size):
        # Create random indices from a uniform distribution and then split it into mask and unmask indices.
        scores = keras.random.uniform(shape=(batch_size, self.num_patches), seed=self.seed_generator)
        rand_indices = tf.argsort(scores, axis=-1)
        return rand_indices[:, : self.num_mask], rand_indices[:, self.num_mask :]


def transformer_block(x):
    x1 = layers.LayerNormalization(epsilon=LAYER_NORM_EPS)(x)
    attention_output = layers.MultiHeadAttention(num_heads=NUM_HEADS, key_dim=PROJECTION_DIM, dropout=0.1)(x1, x1)
    x2 = layers.Add()([attention_output, x])
    x3 = layers.LayerNormalization(epsilon=LAYER_NORM_EPS)(x2)
    x3 = layers.Dense(2 * PROJECTION_DIM, activation="gelu")(x3)
    x3 = layers.Dropout(0.1)(x3)
    x3 = layers.Dense(PROJECTION_DIM, activation="gelu")(x3)
    return layers.Add()([x3, x2])


def create_encoder():
    inputs = layers.Input((None, PROJECTION_DIM))
    outputs = layers.LayerNormalization(epsilon=LAYER_NORM_EPS)(transformer_block(inputs))
    return keras.Model(inputs, outputs, name="mae_encoder")


def create_decoder():
    inputs = layers.Input((NUM_PATCHES, PROJECTION_DIM))
    x = layers.LayerNormalization(epsilon=LAYER_NORM_EPS)(transformer_block(inputs))
    x = layers.Flatten()(x)
    pre_final = layers.Dense(units=IMAGE_SIZE * IMAGE_SIZE * 3, activation="sigmoid")(x)
    outputs = layers.Reshape((IMAGE_SIZE, IMAGE_SIZE, 3))(pre_final)
    return keras.Model(inputs, outputs, name="mae_decoder")


class MaskedAutoencoder(keras.Model):
    def __init__(self, augmentation_model, patch_layer, patch_encoder, encoder, decoder, **kwargs):
        super().__init__(**kwargs)
        self.train_augmentation_model, self.test_augmentation_model = augmentation_model
        self.patch_layer = patch_layer
        self.patch_encoder = patch_encoder
        self.encoder = encoder
        self.decoder = decoder

    def calculate_loss(self, images, test=False):
        # Augment the input images.
        if test:
            augmented_images = self.test_augmentation_model(images, training=False)
        else:
            augmented_images = self.train_augmentation_model(images, training=True)

        # Patch the augmented images, and encode the patches.
        patches = self.patch_layer(augmented_images)
        unmasked, masked, unmasked_positions, mask_indices, _ = self.patch_encoder(patches)

        # Pass the unmasked patches to the encoder, and all of them to the decoder.
        encoder_outputs = self.encoder(unmasked, training=not test) + unmasked_positions
        decoder_inputs = ops.concatenate([encoder_outputs, masked], axis=1)
        decoder_outputs = self.decoder(decoder_inputs, training=not test)
        decoder_patches = self.patch_layer(decoder_outputs)

        loss_patch = tf.gather(patches, mask_indices, axis=1, batch_dims=1)
        loss_output = tf.gather(decoder_patches, mask_indices, axis=1, batch_dims=1)

        # Compute the total loss.
        total_loss = self.compute_loss(y=loss_patch, y_pred=loss_output)
        return total_loss, loss_patch, loss_output

    def train_step(self, images):
        with tf.GradientTape() as tape:
            total_loss, loss_patch, loss_output = self.calculate_loss(images)

        # Apply gradients.
        train_vars = [
            self.train_augmentation_model.trainable_variables,
            self.patch_layer.trainable_variables,
            self.patch_encoder.trainable_variables,
            self.encoder.trainable_variables,
            self.decoder.trainable_variables,
        ]
        grads = tape.gradient(total_loss, train_vars)
        tv_list = []
        for grad, var in zip(grads, train_vars):
            for g, v in zip(grad, var):
                tv_list.append((g, v))
        self.optimizer.apply_gradients(tv_list)
        return self.report(total_loss, loss_patch, loss_output)

    def test_step(self, images):
        total_loss, loss_patch, loss_output = self.calculate_loss(images, test=True)
        return self.report(total_loss, loss_patch, loss_output)

    def report(self, total_loss, loss_patch, loss_output):
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(total_loss)
            else:
                metric.update_state(loss_patch, loss_output)
        return {m.name: m.result() for m in self.metrics}


train_augmentation_model = keras.Sequential(
    [layers.Rescaling(1 / 255.0), layers.RandomCrop(IMAGE_SIZE, IMAGE_SIZE), layers.RandomFlip("horizontal")],
    name="train_data_augmentation",
)
test_augmentation_model = keras.Sequential([layers.Rescaling(1 / 255.0)], name="test_data_augmentation")

mae_model = MaskedAutoencoder(
    augmentation_model=(train_augmentation_model, test_augmentation_model),
    patch_layer=Patches(),
    patch_encoder=PatchEncoder(),
    encoder=create_encoder(),
    decoder=create_decoder(),
)

# Compile and pretrain the model.
optimizer = keras.optimizers.AdamW(learning_rate=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
mae_model.compile(optimizer=optimizer, loss=keras.losses.MeanSquaredError(), metrics=["mae"])
history = mae_model.fit(train_ds, epochs=EPOCHS, validation_data=val_ds)

# Measure its performance.
loss, mae = mae_model.evaluate(test_ds)
print(f"Loss: {loss:.4f}")
print(f"MAE: {mae:.4f}")
