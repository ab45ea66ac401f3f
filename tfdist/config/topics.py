"""The groups of flags in `--help`."""

MODEL = "Model and data"
DURATION = "Duration"
DEVICES = "Strategy and devices"
TRAINING = "Training"
GRADIENTS = "Gradients"
OUTPUT = "Output and checkpoints"
CHECKS = "Checks"
TOPICS = (MODEL, DURATION, DEVICES, TRAINING, GRADIENTS, OUTPUT, CHECKS)  # in the order of --help
WITHOUT_EFFECT = "Accepted but ignored, so that flag files of tfdist train can be used"
