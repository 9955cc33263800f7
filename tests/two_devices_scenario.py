# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs the examples of several devices on two logical CPUs, for `multi_gpu_test.py`.

python tests/two_devices_scenario.py FOLDER_OF_DATA_SETS
"""

import json
import pathlib
import runpy
import sys

from absl import flags

EXAMPLES = pathlib.Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

import tensorflow as tf


def image_classifier(data_dir, strategy):
    """Runs train_image_classifier.py; returns what `History` holds."""
    import image_classifier_flags
    import train_image_classifier

    values = flags.FlagValues()
    image_classifier_flags.define_flags(values)
    tiny = [f"--data_dir={data_dir}", "--batch_size=600", "--epochs=2", "--seed=3"]
    values(["train_image_classifier", *tiny, f"--strategy={strategy}"])
    settings = image_classifier_flags.settings_from(values)
    return train_image_classifier.run(settings).history


def main():
    """Runs both scripts."""
    data_dir = sys.argv[1]
    # The program as it is called; it splits the CPU.
    sys.argv = ["multi_gpu.py", "--logical_cpus=2", f"--data_dir={data_dir}",
                "--batch_size=481", "--epochs=2", "--epsilon=5"]  # fmt: skip
    try:
        runpy.run_path(str(EXAMPLES / "multi_gpu.py"), run_name="__main__")
    except SystemExit as end:
        assert not end.code, end
    print("NEXT", flush=True)

    # Without GPUs, TensorFlow's own choice would be one CPU.
    mirrored = tf.distribute.MirroredStrategy
    tf.distribute.MirroredStrategy = lambda: mirrored(["CPU:0", "CPU:1"])
    histories = {name: image_classifier(data_dir, name) for name in ("default", "mirrored")}
    print("RESULT " + json.dumps(histories), flush=True)


if __name__ == "__main__":
    main()
