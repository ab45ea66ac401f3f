"""U-Net with batch normalization for nuclei in microscope images, trained with a Dice loss."""

import numpy as np
from tensorflow import keras
from tensorflow.keras.layers import (
    Activation,
    BatchNormalization,
    Conv2D,
    Conv2DTranspose,
    Input,
    MaxPooling2D,
    concatenate,
)
from tensorflow.keras.models import Model

seed = 42
keras.utils.set_random_seed(seed)

IMG_WIDTH = IMG_HEIGHT = 16
SMOOTH = 1.0


def make_nuclei(n):
    yy, xx = np.mgrid[:IMG_HEIGHT, :IMG_WIDTH]
    X = np.zeros((n, IMG_HEIGHT, IMG_WIDTH, 1), dtype=np.float32)
    Y = np.zeros((n, IMG_HEIGHT, IMG_WIDTH, 1), dtype=bool)
    for i in range(n):
        for _ in range(np.random.randint(0, 4)):
            cy, cx, r = np.random.randint(0, 16), np.random.randint(0, 16), np.random.uniform(1.5, 4)
            Y[i, ..., 0] |= (yy - cy) ** 2 + (xx - cx) ** 2 < r**2
        X[i] = Y[i] * np.random.uniform(0.4, 1.0) + np.random.normal(0, 0.2, X[i].shape)
    return X, Y.astype(np.float32)


def dice_coef(y_true, y_pred):
    """Over all pixels of the batch at once: pictures without a nucleus do no harm."""
    y_true_f = keras.ops.reshape(y_true, (-1,))
    y_pred_f = keras.ops.reshape(y_pred, (-1,))
    intersection = keras.ops.sum(y_true_f * y_pred_f)
    return (2.0 * intersection + SMOOTH) / (keras.ops.sum(y_true_f) + keras.ops.sum(y_pred_f) + SMOOTH)


def dice_coef_loss(y_true, y_pred):
    return 1.0 - dice_coef(y_true, y_pred)


def bce_dice_loss(y_true, y_pred):
    return 0.5 * keras.losses.binary_crossentropy(y_true, y_pred) + dice_coef_loss(y_true, y_pred)


def conv_block(x, filters):
    for _ in range(2):
        x = Conv2D(filters, (3, 3), padding="same", kernel_initializer="he_normal", use_bias=False)(x)
        x = BatchNormalization(momentum=0.8)(x)
        x = Activation("relu")(x)
    return x


def get_unet():
    inputs = Input((IMG_HEIGHT, IMG_WIDTH, 1))
    c1 = conv_block(inputs, 4)
    p1 = MaxPooling2D((2, 2))(c1)
    c2 = conv_block(p1, 8)
    p2 = MaxPooling2D((2, 2))(c2)
    c3 = conv_block(p2, 8)
    u4 = Conv2DTranspose(8, (2, 2), strides=(2, 2), padding="same")(c3)
    c4 = conv_block(concatenate([u4, c2]), 8)
    u5 = Conv2DTranspose(4, (2, 2), strides=(2, 2), padding="same")(c4)
    c5 = conv_block(concatenate([u5, c1]), 4)
    outputs = Conv2D(1, (1, 1), activation="sigmoid")(c5)
    return Model(inputs=[inputs], outputs=[outputs])


X_train, Y_train = make_nuclei(110)
X_test, Y_test = make_nuclei(37)

model = get_unet()
model.compile(
    optimizer=keras.optimizers.Adam(learning_rate=0.01),
    loss=bce_dice_loss,
    metrics=[dice_coef, keras.metrics.BinaryIoU(target_class_ids=[1], threshold=0.5, name="iou")],
)
print("parameters:", model.count_params())

results = model.fit(X_train, Y_train, validation_split=0.1, batch_size=16, epochs=3, verbose=2)

print("loss:", results.history["loss"])
print("dice:", results.history["dice_coef"], results.history["val_dice_coef"])
print("iou:", results.history["iou"])
print("test:", model.evaluate(X_test, Y_test, batch_size=8, return_dict=True, verbose=0))
preds_test = model.predict(X_test, batch_size=10, verbose=0)
preds_test_t = (preds_test > 0.5).astype(np.uint8)
print("pixels found:", int(preds_test_t.sum()), "of", int(Y_test.sum()))
