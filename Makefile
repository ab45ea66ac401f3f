# make train        sets up .venv and trains a CNN on handwritten digits, on two logical devices
# make test         the same set-up, Horovod built for the installed TensorFlow and MPI, then lint, types and every test: first in
#                   parallel on all cores, then, two at a time, tests that start processes, beside those that wait for the clock
# make lint         ruff and mypy
# make conformance  what make test leaves out: strategies, models, optimizers and batches in all combinations of three; every
#                   program through fit; every strategy's checkpoint under every other; elastic runs of every engine. SLICE=3/36
#                   runs the third of 36 parts, which takes at most 8 minutes
# make chaos        SEEDS=100 runs of each strategy that are killed and preempted at random, and must end as if they were not
# make fuzz         FUZZ_EXAMPLES=20000 arbitrary inputs for each parser of what others can send or write; make test tries 100
# make peers        creates .venv-peers with PyTorch, which benchmarks/ compares with
# make docs         builds the documentation site: open site/index.html; a warning is an error
# make dist         builds the source distribution and the wheel of a release in dist/
# make outdated     prints newer versions of TensorFlow, Keras and other packages, and the tests that pin the behavior of the old
# make clean        removes .venv and the files of tools; keeps runs/
#
# `make train PYTHON=python3.12` chooses the interpreter of .venv (Python 3.11 to 3.13); an existing .venv is used as it is.

PYTHON ?=
VENV ?= .venv
TRAIN_FLAGS ?= --strategy=mirrored --devices=2 --model=cnn --dataset=digits --batch_size=64 --epochs=20
SEEDS ?= 100
FUZZ_EXAMPLES ?= 20000
SLICE ?= 1/1
OUTPUT_DIR ?= runs/digits-$(shell date +%Y%m%d-%H%M%S)

PY := $(VENV)/bin/python
# The versions of constraints.txt, in variables since an option does not hold for what pip needs to build a package.
CONSTRAINED := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt
PIP_INSTALL := -m pip --disable-pip-version-check install --quiet
IS_SUPPORTED := 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'
PYTHONS := $(if $(PYTHON),$(PYTHON),python3 python3.13 python3.12 python3.11)

PARALLEL := --numprocesses=logical --maxprocesses=4 --dist=worksteal
TWO_AT_A_TIME := --numprocesses=logical --maxprocesses=2 --dist=loadfile --no-loadscope-reorder

# Each stage of the set-up leaves a stamp in .venv: what is newer than its stamp is done again, all else is reused.
CREATED := $(VENV)/.created
EXAMPLES := $(VENV)/.installed-examples
TESTS := $(VENV)/.installed-test
HOROVOD := $(VENV)/.installed-horovod
PEERS := .venv-peers

.PHONY: train test lint docs conformance chaos fuzz peers dist outdated clean
.DELETE_ON_ERROR:

# Each process that a test starts would compile the sources again.
unexport PYTHONDONTWRITEBYTECODE

train: $(EXAMPLES)
	$(PY) -m tfdist.train $(TRAIN_FLAGS) --output_dir=$(OUTPUT_DIR)

# Lint and types, and the tests that wait for the clock, which need a twentieth of a core, run beside the other tests of processes.
test: $(HOROVOD)
	$(PY) -m pytest -m 'not full and not processes' $(PARALLEL) --junit-xml=.pytest_cache/parallel.xml
	@$(MAKE) --no-print-directory lint >$(VENV)/lint.log 2>&1 & lint=$$!; \
	$(PY) -m pytest -m 'waits and not full' --junit-xml=.pytest_cache/waits.xml >$(VENV)/waits.log 2>&1 & waits=$$!; \
	$(PY) -m pytest -m 'processes and not waits and not full' $(TWO_AT_A_TIME) \
	  --junit-xml=.pytest_cache/processes.xml; tests=$$?; \
	wait $$waits; waited=$$?; cat $(VENV)/waits.log; \
	wait $$lint; linted=$$?; cat $(VENV)/lint.log; exit $$((tests | waited | linted))

lint: $(TESTS)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

docs: $(TESTS)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet
	@echo site/index.html

# The longest first, and what may share a job in one process of pytest: see tests/slicing.py.
conformance: $(HOROVOD)
	$(PY) -m pytest -m full --slice=$(SLICE) --numprocesses=logical --maxprocesses=2 --dist=loadgroup --no-loadscope-reorder \
	  --junit-xml=.pytest_cache/conformance/$(subst /,-of-,$(SLICE)).xml

chaos: $(HOROVOD)
	$(PY) -m tests.end_to_end.chaos --seeds=$(SEEDS)

fuzz: $(HOROVOD)
	FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) $(PY) -m pytest -m fuzz --hypothesis-profile=fuzz $(PARALLEL)

# The wheel is built from the source distribution, which shows that nothing is missing in it.
dist: $(TESTS)
	@rm -rf dist
	@$(PY) -c 'import setuptools.build_meta as build; build.build_sdist("dist")' >/dev/null
	@$(PY) -m pip --disable-pip-version-check wheel --quiet --no-deps --no-build-isolation --wheel-dir dist dist/*.tar.gz
	@ls dist/*

outdated: $(TESTS)
	@$(PY) -m tests.outdated

peers: $(PEERS)/.installed

$(PEERS)/.installed: $(CREATED) constraints.txt
	@$(PY) -m venv $(PEERS)
	@$(CONSTRAINED) $(PEERS)/bin/python $(PIP_INSTALL) torch==2.13.0 numpy
	@touch $@

$(CREATED):
	@if $(PY) -c $(IS_SUPPORTED) 2>/dev/null && $(PY) -m pip --version >/dev/null 2>&1; then touch $@; exit; fi; \
	for python in $(PYTHONS); do \
	  "$$python" -c $(IS_SUPPORTED) 2>/dev/null || continue; \
	  "$$python" -c 'import venv, ensurepip' 2>/dev/null || { \
	    echo "make: $$python cannot make virtual environments. Install the Debian package python3-venv." >&2; exit 2; }; \
	  echo "Creating $(VENV) with $$python"; \
	  "$$python" -m venv $(VENV) && touch $@; exit; \
	done; \
	echo "make: Python 3.11, 3.12 or 3.13 is needed. Tried: $(PYTHONS). Run: make PYTHON=/path/to/python3.12" >&2; \
	exit 2

$(EXAMPLES): $(CREATED) setup.cfg constraints.txt
	@echo "Installing tfdist and TensorFlow into $(VENV)"
	@$(CONSTRAINED) $(PY) $(PIP_INSTALL) --editable '.[examples]'
	@touch $@

$(TESTS): $(CREATED) setup.cfg constraints.txt
	@for tool in g++ make; do command -v $$tool >/dev/null || { \
	  echo "make: the tests build Horovod, which needs $$tool. Install the Debian package $$tool." >&2; exit 2; }; done
	@echo "Installing tfdist, TensorFlow and the tests' tools into $(VENV)"
	@$(CONSTRAINED) $(PY) $(PIP_INSTALL) --editable '.[examples,horovod,test]'
	@touch $@ $(EXAMPLES)

$(HOROVOD): $(TESTS) tfdist/install_horovod.py tfdist/cli/horovod_build.py tfdist/cli/horovod_build_requirements.txt
	@$(PY) -m tfdist.install_horovod --mpi
	@touch $@

clean:
	rm -rf $(VENV) $(PEERS) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
