# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
#
#   make demo                          trains a private classifier of digit images
#   make demo DATASET=fashion_mnist    the same on another data set
#   make test                          runs the tests, but for the long ones
#   make test-long                     runs those: kills, several processes, searches
#   make test-all                      runs both
#   make benchmark                     measures what privacy costs; FLAGS=--quick in ten minutes
#   make bazel-test                    builds everything and runs some of the tests with Bazel
#   make lint                          checks the form and the types of Python, and the BUILD files
#   make docs                          makes a site of the documentation in out/docs
#   make dist                          builds the wheel and the source distribution in out/dist
#   make test-dist                     installs them in a clean environment and trains there
#   make test-matrix                   runs the tests with the lowest and the newest TensorFlow
#                                      and Keras that setup.py admits
#   make clean                         removes .venv and everything that was built
#
# The first run creates .venv and installs dice_tf there; later runs reuse it.
# COVERAGE=1 lets tests print which lines and branches none of them reaches, and take a third
# longer.
# PYTHON=python3.12 chooses the interpreter, FLAGS='--epsilon=4' passes flags
# to the demo (FLAGS='--quick' to the benchmark), PYTEST_ARGS='-k noise' arguments to pytest.

PYTHON ?=
VENV := .venv
VENV_PYTHON := $(VENV)/bin/python

DATASET ?= digits
# Not "build": where file names ignore case, that is the file BUILD.
OUTPUT ?= out/demo/$(DATASET)
FLAGS ?=
WORKERS ?= 2
# Long tests wait for processes that they start.
LONG_WORKERS ?= 4
PYTEST_ARGS ?=
# Requirements beyond those of setup.py.
VERSIONS ?=

# dice_tf is for this backend; a user's keras.json may name another.
export KERAS_BACKEND = tensorflow
# Warnings and errors, but no start-up notes.
export TF_CPP_MIN_LOG_LEVEL ?= 1

.NOTPARALLEL:
.PHONY: help demo benchmark test test-long test-all lint docs dist test-dist test-matrix bazel-test clean

help:
	@sed -n '/^#   /s/^#  //p' Makefile

# Fixed features are better there than a small network, which has more weights to get noise.
DEMO := examples/train_image_classifier.py --dataset=$(DATASET)
ifeq ($(DATASET),fashion_mnist)
DEMO := examples/train_on_features.py
endif

# Without a GPU, TensorFlow logs that as an error; real ones are raised anyway.
demo: export TF_CPP_MIN_LOG_LEVEL = 3
demo: $(VENV)/demo.stamp
	$(VENV_PYTHON) $(DEMO) --output_dir=$(OUTPUT) $(FLAGS)

benchmark: export TF_CPP_MIN_LOG_LEVEL = 3
benchmark: $(VENV)/benchmarks.stamp
	$(VENV_PYTHON) benchmarks/benchmark.py $(FLAGS)
	$(VENV_PYTHON) benchmarks/noise.py

SHOW_VERSIONS := import sys; from importlib.metadata import version; print("Python", \
    sys.version.split()[0], *(f"{name} {version(name)}" for name in ("tensorflow", "keras")))

COVERAGE ?=
PYTEST = $(VENV_PYTHON) $(if $(COVERAGE),-m coverage run) -m pytest --dist worksteal --durations=20

test: $(VENV)/test.stamp
	@rm -rf out/coverage
	@$(VENV_PYTHON) -c '$(SHOW_VERSIONS)'
	$(PYTEST) -n $(WORKERS) -m "not long" $(PYTEST_ARGS)
	$(if $(COVERAGE),$(REPORT_COVERAGE))

test-long: $(VENV)/test.stamp
	$(PYTEST) -n $(LONG_WORKERS) -m long $(PYTEST_ARGS)
	$(if $(COVERAGE),$(REPORT_COVERAGE))

test-all: test test-long

# All in all, and what is missing in each file of which less than 95 % is reached; after
# `make test-all` by both.
REPORT_COVERAGE = $(VENV_PYTHON) -m coverage combine --quiet --append && \
    $(VENV_PYTHON) -m coverage report \
    | awk '/^(Name|TOTAL|-)/ || $$6 + 0 < 95'

# The tests find TensorFlow in .venv, through PATH: Bazel itself fetches nothing.
bazel-test: $(VENV)/test.stamp
	@command -v bazel >/dev/null || { \
	    echo "make bazel-test needs bazel (on Debian: apt-get install bazel-bootstrap)." >&2; \
	    exit 1; }
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" bazel build //...
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" bazel test --config=fast //...

NODE_PACKAGES := @bazel/buildifier@8.2.1 pyright@1.1.414
PYTHON_FILES := dice_tf tests examples benchmarks docs setup.py
NODE_BIN := out/node/node_modules/.bin
NODE_STAMP := out/node/$(subst /,+,$(subst $() ,_,$(NODE_PACKAGES))).stamp

lint: $(NODE_STAMP) $(VENV)/lint.stamp
	$(VENV_PYTHON) -m ruff check $(PYTHON_FILES)
	$(VENV_PYTHON) -m ruff format --check $(PYTHON_FILES)
	$(NODE_BIN)/pyright --pythonpath $(VENV_PYTHON)
	$(VENV_PYTHON) -m mypy
	$(NODE_BIN)/buildifier -mode=check -lint=warn -r \
	    $(wildcard WORKSPACE BUILD benchmarks docs examples tests third_party)
	@echo "lint: formats are as ruff and buildifier have them, types as pyright and mypy have them."

# Named after the versions, so that another version is installed. The packages carry what
# they need; their scripts have nothing to add.
$(NODE_STAMP):
	@command -v npm >/dev/null || { \
	    echo "make lint needs npm, which installs buildifier and pyright (on Debian: apt-get" \
	        "install npm)." >&2; \
	    exit 1; }
	rm -rf out/node
	npm install --prefix out/node --no-save --no-audit --no-fund --ignore-scripts \
	    $(NODE_PACKAGES)
	@touch $@

# From scratch, so that every warning shows, and every warning is an error.
docs: export TF_CPP_MIN_LOG_LEVEL = 3
docs: $(VENV)/docs.stamp
	rm -rf out/docs
	$(VENV_PYTHON) -m sphinx -q -W --keep-going -c docs -b html -d out/doctrees . out/docs
	@echo "docs: open out/docs/index.html"

# The wheel is built from the source distribution, so nothing it needs is missing there.
dist:
	$(MAKE) VENV=out/build_env out/build_env/created.stamp
	out/build_env/bin/python -m pip install --quiet --disable-pip-version-check build
	rm -rf out/dist
	out/build_env/bin/python -m build --outdir out/dist
	@ls out/dist

# Away from this folder, whose dice_tf would be imported in place of the installed one.
SMOKE := cd out/clean_env && bin/python ../../tests/installed_smoke.py

test-dist: export TF_CPP_MIN_LOG_LEVEL = 3
test-dist: dist
	rm -rf out/clean_env
	$(MAKE) VENV=out/clean_env out/clean_env/created.stamp
	out/clean_env/bin/python -m pip install --quiet --disable-pip-version-check out/dist/*.whl
	$(SMOKE)
	out/clean_env/bin/python -m pip install --quiet --disable-pip-version-check \
	    --no-deps --force-reinstall out/dist/*.tar.gz
	$(SMOKE)

# The lowest versions follow from setup.py. No TensorFlow 2.16 is made for Python 3.13.
LOWEST = $(shell sed -nE "s/^ *\"(tensorflow|keras)>=([0-9.]+),.*/'\1==\2.*'/p" setup.py)
# TensorFlow 2.16 has an older protobuf than newer releases of what TFDS brings along need.
FITTING := 'tensorflow-metadata<1.17'
LOWEST_PYTHON ?= python3.10 python3.11 python3.12
NEWEST_PYTHON ?= python3.13 python3.12 python3.11 python3.10

# Both run, whatever the first one says.
test-matrix:
	@failed=0; \
	$(MAKE) test VENV=out/lowest PYTHON="$(LOWEST_PYTHON)" VERSIONS="$(LOWEST) $(FITTING)" || failed=1; \
	$(MAKE) test VENV=out/newest PYTHON="$(NEWEST_PYTHON)" VERSIONS= || failed=1; \
	exit $$failed

clean:
	rm -rf $(VENV) out *.egg-info

# --- The environment -------------------------------------------------------

# An environment is installed again when something that decides what belongs
# there is younger than its stamp.
PACKAGING := setup.py pyproject.toml dice_tf/version.py

$(VENV)/demo.stamp: EXTRAS = demo
$(VENV)/test.stamp: EXTRAS = test
$(VENV)/benchmarks.stamp: EXTRAS = benchmarks
$(VENV)/docs.stamp: EXTRAS = docs
$(VENV)/lint.stamp: EXTRAS = lint
$(VENV)/test.stamp: ALSO = $(VENV)/demo.stamp
$(VENV)/demo.stamp $(VENV)/test.stamp $(VENV)/benchmarks.stamp $(VENV)/docs.stamp \
    $(VENV)/lint.stamp: \
    $(VENV)/created.stamp $(PACKAGING)
	@echo "Installing dice_tf [$(EXTRAS)] into $(VENV)."
	@echo "TensorFlow is a download of several hundred MB: a few minutes, once."
	$(VENV_PYTHON) -m pip install --disable-pip-version-check --editable '.[$(EXTRAS)]' $(VERSIONS)
	@touch $@ $(ALSO)

# Newest last: the stacks behind TensorFlow reach a new Python late, and
# tensorflow-privacy stops before 3.12.
CANDIDATES := $(if $(PYTHON),$(PYTHON),python3 python3.11 python3.12 python3.10 python3.13)
SUPPORTED := import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 14))
COMPLETE := import ensurepip, venv

# Before 25.1, pip's search among the pins of tensorflow-privacy can take hours.
$(VENV)/created.stamp:
	@incomplete=""; chosen=""; \
	for python in $(CANDIDATES); do \
	    "$$python" -c '$(SUPPORTED)' 2>/dev/null || continue; \
	    if "$$python" -c '$(COMPLETE)' 2>/dev/null; then chosen="$$python"; break; fi; \
	    incomplete="$$incomplete $$python"; \
	done; \
	if [ -z "$$chosen" ]; then \
	    if [ -n "$$incomplete" ]; then \
	        echo "Found$$incomplete, but without the venv and ensurepip modules." >&2; \
	        echo "On Debian and Ubuntu: apt-get install python3-venv" >&2; \
	    else \
	        echo "dice_tf needs Python 3.10, 3.11, 3.12 or 3.13; tried: $(CANDIDATES)." >&2; \
	        echo "Name another interpreter with: make PYTHON=/path/to/python ..." >&2; \
	    fi; \
	    exit 1; \
	fi; \
	echo "Creating $(VENV) with $$("$$chosen" --version) ($$chosen)."; \
	"$$chosen" -m venv --clear $(VENV)
	$(VENV_PYTHON) -m pip install --disable-pip-version-check --upgrade 'pip>=25.1'
	@touch $@
