"""The functional API: a model with several inputs and outputs, a shared layer, and nested autoencoders."""

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(812)

encoder_input = keras.Input(shape=(12, 12, 1), name="original_img")
x = layers.Conv2D(8, 3, activation="relu")(encoder_input)
x = layers.Conv2D(8, 3, activation="relu")(x)
x = layers.MaxPooling2D(2)(x)
encoder_output = layers.GlobalMaxPooling2D()(x)
encoder = keras.Model(encoder_input, encoder_output, name="encoder")
encoder.summary()

decoder_input = keras.Input(shape=(8,), name="encoded_img")
x = layers.Dense(36)(decoder_input)
x = layers.Reshape((6, 6, 1))(x)
x = layers.Conv2DTranspose(8, 3, activation="relu", padding="same")(x)
x = layers.UpSampling2D(2)(x)
decoder_output = layers.Conv2DTranspose(1, 3, activation="sigmoid", padding="same")(x)
decoder = keras.Model(decoder_input, decoder_output, name="decoder")
decoder.summary()

autoencoder_input = keras.Input(shape=(12, 12, 1), name="img")
encoded_img = encoder(autoencoder_input)
decoded_img = decoder(encoded_img)
autoencoder = keras.Model(autoencoder_input, decoded_img, name="autoencoder")
autoencoder.summary()
autoencoder.compile(optimizer="rmsprop", loss="mse")
images = np.random.random((100, 12, 12, 1)).astype("float32")
autoencoder_history = autoencoder.fit(images, images, epochs=2, batch_size=32)
print(autoencoder_history.history["loss"], encoder.predict(images[:2], verbose=0).shape)

num_tags = 12  # Number of unique issue tags
num_words = 50  # Size of vocabulary obtained when preprocessing text data
num_departments = 4  # Number of departments for predictions

title_input = keras.Input(shape=(None,), name="title")  # Variable-length sequence of ints
body_input = keras.Input(shape=(None,), name="body")  # Variable-length sequence of ints
tags_input = keras.Input(shape=(num_tags,), name="tags")  # Binary vectors of size `num_tags`

shared_embedding = layers.Embedding(num_words, 8)
title_features = shared_embedding(title_input)
body_features = shared_embedding(body_input)

title_features = layers.LSTM(8)(title_features)
body_features = layers.LSTM(6)(body_features)

x = layers.concatenate([title_features, body_features, tags_input])
priority_pred = layers.Dense(1, name="priority")(x)
department_pred = layers.Dense(num_departments, name="department")(x)

model = keras.Model(
    inputs=[title_input, body_input, tags_input], outputs={"priority": priority_pred, "department": department_pred}
)
model.compile(
    optimizer=keras.optimizers.RMSprop(1e-3),
    loss={
        "priority": keras.losses.BinaryCrossentropy(from_logits=True),
        "department": keras.losses.CategoricalCrossentropy(from_logits=True),
    },
    loss_weights={"priority": 1.0, "department": 0.2},
)

title_data = np.random.randint(num_words, size=(128, 8))
body_data = np.random.randint(num_words, size=(128, 16))
tags_data = np.random.randint(2, size=(128, num_tags)).astype("float32")

priority_targets = np.random.random(size=(128, 1))
dept_targets = np.random.randint(2, size=(128, num_departments))

history = model.fit(
    {"title": title_data, "body": body_data, "tags": tags_data},
    {"priority": priority_targets, "department": dept_targets},
    epochs=2,
    batch_size=32,
    validation_data=(
        {"title": title_data[:48], "body": body_data[:48], "tags": tags_data[:48]},
        {"priority": priority_targets[:48], "department": dept_targets[:48]},
    ),
)
predictions = model.predict({"title": title_data, "body": body_data, "tags": tags_data})
