# make train        sets up .venv and trains a CNN on handwritten digits, on two logical devices
# make check        ruff, mypy, and the tests that need no TensorFlow
# make test         these, and all other quick tests: every strategy, command and engine starts once. Builds Horovod if it can
# make test-all     these, and all slow tests but those of make conformance
# make conformance  strategies, models, optimizers and batches in all combinations of three; every program through fit; every
#                   strategy's checkpoint under every other; elastic runs of every engine. SLICE=3/36 runs the third of 36 parts,
#                   which takes at most 8 minutes
# make since        COMMIT=a1b2c3d TEST=tests/data/rows_test.py::test_a finds the first commit after COMMIT at which a test fails
# make lint         ruff and mypy
# make horovod      builds Horovod for the installed TensorFlow and MPI, in three minutes; needs g++
# make chaos        SEEDS=100 runs of each strategy that are killed and preempted at random, and must end as if they were not
# make fuzz         FUZZ_EXAMPLES=20000 arbitrary inputs for each parser of what others can send or write; make test tries 100
# make peers        creates .venv-peers with PyTorch and tf_keras, which benchmarks/ compares with
# make docs         builds the documentation site: open site/index.html; a warning is an error
# make dist         builds the source distribution and the wheel of a release in dist/
# make outdated     prints which installed packages have newer versions
# make clean        removes .venv and the files of tools; keeps runs/
#
# `make train PYTHON=python3.12` chooses the interpreter of .venv (Python 3.11 to 3.13); an existing .venv is used as it is.

PYTHON ?=
VENV ?= .venv
TRAIN_FLAGS ?= --strategy=mirrored --devices=2 --model=cnn --dataset=digits --batch_size=64 --epochs=20
SEEDS ?= 100
FUZZ_EXAMPLES ?= 20000
SLICE ?= 1/1
COMMIT ?=
TEST ?=
RUN_FLAGS ?=
OUTPUT_DIR ?= runs/digits-$(shell date +%Y%m%d-%H%M%S)

PY := $(VENV)/bin/python
# The versions of constraints.txt, in variables since an option does not hold for what pip needs to build a package.
CONSTRAINED := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt
PIP_INSTALL := -m pip --disable-pip-version-check install --quiet
IS_SUPPORTED := 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'
PYTHONS := $(if $(PYTHON),$(PYTHON),python3 python3.13 python3.12 python3.11)

PARALLEL := --numprocesses=logical --maxprocesses=4 --dist=worksteal

# Each stage of the set-up leaves a stamp in .venv: what is newer than its stamp is done again, all else is reused.
CREATED := $(VENV)/.created
EXAMPLES := $(VENV)/.installed-examples
TESTS := $(VENV)/.installed-test
HOROVOD := $(VENV)/.installed-horovod
PEERS := .venv-peers

.PHONY: train check test test-all test-slow since lint horovod docs conformance chaos fuzz peers dist outdated clean
.DELETE_ON_ERROR:

# Each process that a test starts would compile the sources again.
unexport PYTHONDONTWRITEBYTECODE

train: $(EXAMPLES)
	$(PY) -m tfdist.train $(TRAIN_FLAGS) --output_dir=$(OUTPUT_DIR)

check: $(TESTS)
	$(PY) -m tests.sessions check

# Without a compiler, tests that need Horovod are skipped, and counted.
test: $(TESTS)
	@if command -v g++ >/dev/null || [ -e $(HOROVOD) ]; then $(MAKE) --no-print-directory horovod; fi
	$(PY) -m tests.sessions quick $(RUN_FLAGS)

test-all: $(HOROVOD)
	$(PY) -m tests.sessions all $(RUN_FLAGS)

# What continuous integration runs besides `make test`: a part of the slow tests, and those of what has changed since a commit.
test-slow: $(HOROVOD)
	$(PY) -m tests.sessions slow --slice=$(SLICE) $(if $(COMMIT),--since=$(COMMIT)) $(RUN_FLAGS)

# In a worktree of its own: the working tree is not touched. A commit without the test (pytest's codes 4 and 5) is skipped.
since: $(HOROVOD)
	@tree=$$(mktemp -d) && git worktree add --quiet --detach $$tree HEAD && \
	trap 'git worktree remove --force '$$tree EXIT && \
	git -C $$tree bisect start HEAD $(COMMIT) && \
	git -C $$tree bisect run sh -c 'ln -sfn ../strategies tfdist/strategies; \
	  PYTHONPATH=. $(abspath $(PY)) -m pytest -q -x -m "" "$(TEST)"; code=$$?; rm tfdist/strategies; \
	  [ $$code -lt 4 ] && exit $$code || exit 125'

lint: $(TESTS)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

docs: $(TESTS)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet
	@echo site/index.html

horovod: $(HOROVOD)

# The longest first; what shares a job runs in one process: see tests/tiers.py.
conformance: $(HOROVOD)
	$(PY) -m pytest -m full --slice=$(SLICE) --numprocesses=logical --maxprocesses=2 --dist=loadgroup --no-loadscope-reorder \
	  --junit-xml=.pytest_cache/conformance/$(subst /,-of-,$(SLICE)).xml

chaos: $(HOROVOD)
	$(PY) -m tests.end_to_end.chaos --seeds=$(SEEDS)
	$(PY) -m tests.end_to_end.chaos.stale_updates --seeds=$(SEEDS)

fuzz: $(HOROVOD)
	FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) $(PY) -m pytest -m fuzz --hypothesis-profile=fuzz $(PARALLEL)

# The wheel is built from the source distribution, which shows that nothing is missing in it.
dist: $(TESTS)
	@rm -rf dist
	@$(PY) -c 'import setuptools.build_meta as build; build.build_sdist("dist")' >/dev/null
	@$(PY) -m pip --disable-pip-version-check wheel --quiet --no-deps --no-build-isolation --wheel-dir dist dist/*.tar.gz
	@ls dist/*

outdated: $(TESTS)
	@$(PY) -m pip --disable-pip-version-check list --outdated

peers: $(PEERS)/.installed

$(PEERS)/.installed: $(CREATED) constraints.txt
	@$(PY) -m venv $(PEERS)
	@$(CONSTRAINED) $(PEERS)/bin/python $(PIP_INSTALL) torch==2.13.0 numpy tensorflow tf_keras==2.21.0
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
	@echo "Installing tfdist, TensorFlow and the tests' tools into $(VENV)"
	@$(CONSTRAINED) $(PY) $(PIP_INSTALL) --editable '.[examples,horovod,test]'
	@touch $@ $(EXAMPLES)

$(HOROVOD): $(TESTS) tfdist/install_horovod.py tfdist/cli/horovod_build.py tfdist/cli/horovod_build_requirements.txt
	@command -v g++ >/dev/null || { echo "make: Horovod needs g++. Install the Debian package g++." >&2; exit 2; }
	@$(PY) -m tfdist.install_horovod --mpi
	@touch $@

clean:
	rm -rf $(VENV) $(PEERS) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
