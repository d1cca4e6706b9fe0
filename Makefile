# make quickstart   see in half a minute what position embeddings do on longer inputs; then train two of them on
#                   built-in data and compare them by sentence length
#                   (DATA=train.en,train.de for your own text; ARGS=... for other options: both go on at once)
# make test         lint and the whole test suite; make test-fast leaves out what starts subprocesses
# All targets install what they need into .venv first; `make setup` does only that. What stands
# behind ## at a target is its line of `make help`.

PYTHON ?= python3
WORKERS ?= 2
FAIRSEQ := fairseq-fixed==0.12.3.1

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PACKAGES := cape_plugins fairseq_user_dir hf_models

.DEFAULT_GOAL := help
.PHONY: help setup setup-hf setup-serve quickstart test test-fast gpu-check test-versions test-hf-common lint format bench wheel clean distclean

help: ## shows these lines
	@sed -n 's/^\([a-z-]*\):.*## /make \1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 24

# ---- installation --------------------------------------------------------------------------------
# Each step leaves a stamp, so that a second call does nothing and an interrupted one goes on.

# Fairseq compiles for a minute and more; the other packages come meanwhile.
setup: $(VENV)/compiler.stamp ## installs fairseq and what it needs into .venv
	@$(MAKE) --no-print-directory --jobs 2 $(VENV)/wheel.stamp $(VENV)/base.stamp
	@$(MAKE) --no-print-directory $(VENV)/project.stamp

$(VENV)/venv.stamp:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' || \
	    { echo "error: $(PYTHON) is not Python 3.10, 3.11 or 3.12; choose one: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	    { echo "error: $(PYTHON) cannot make virtual environments; on Debian: apt-get install python3-venv" >&2; exit 1; }
	@touch $@

# what fairseq is compiled with
$(VENV)/compiler.stamp: requirements/base.txt $(VENV)/venv.stamp
	$(PIP) install --constraint requirements/base.txt torch numpy Cython setuptools wheel
	@touch $@

$(VENV)/base.stamp: requirements/base.txt $(VENV)/compiler.stamp
	$(PIP) install -r requirements/base.txt
	@touch $@

# Alone, without build isolation (it compiles against the numpy and Cython just installed) and
# without dependencies (see requirements/base.txt). Without debug information it compiles in a third
# less time. (`build_ext --parallel` fails: its extensions write one build.ninja.)
$(VENV)/wheel.stamp: Makefile $(VENV)/compiler.stamp
	CFLAGS="$(CFLAGS) -g0" $(PIP) wheel --no-build-isolation --no-deps --wheel-dir $(VENV)/wheels $(FAIRSEQ) || \
	    { echo "error: fairseq needs a C++ compiler and Python headers; on Debian: apt-get install g++ python3-dev" >&2; exit 1; }
	@touch $@

$(VENV)/fairseq.stamp: $(VENV)/wheel.stamp $(VENV)/base.stamp
	$(PIP) install --no-deps --no-index --find-links $(VENV)/wheels $(FAIRSEQ)
	@touch $@

# Editable, so that commands and tests always run the code of this checkout, never a stale copy. An
# editable package is known to Python, but `--user-dir cape_plugins` looks for a folder: from
# elsewhere than the repository root say --user-dir "$(cape-plugins user-dir)".
# Done again when the metadata change or a package is added.
$(VENV)/project.stamp: setup.py pyproject.toml $(wildcard $(PACKAGES:=/__init__.py)) $(VENV)/fairseq.stamp
	$(PIP) install --no-build-isolation --no-deps -e .
	@touch $@

setup-hf: setup ## adds Hugging Face
	@$(MAKE) --no-print-directory $(VENV)/hf.stamp

# The pinned versions need Python 3.11; Python 3.10 gets the last ones that support it.
$(VENV)/hf.stamp: requirements/hf.txt $(VENV)/project.stamp
	@if $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))'; \
	then $(PIP) install -r requirements/hf.txt; else $(PIP) install -e '.[hf]'; fi
	@touch $@

setup-serve: $(VENV)/compiler.stamp ## adds Hugging Face and the engines of `cape-plugins export`
	@$(MAKE) --no-print-directory --jobs 2 $(VENV)/wheel.stamp $(VENV)/engines.stamp
	@$(MAKE) --no-print-directory $(VENV)/serve.stamp

$(VENV)/engines.stamp: requirements/hf.txt requirements/serve.txt $(VENV)/base.stamp
	@if $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))'; \
	then $(PIP) install -r requirements/hf.txt -r requirements/serve.txt; fi
	@touch $@

$(VENV)/serve.stamp: requirements/serve.txt $(VENV)/hf.stamp
	@if $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))'; \
	then $(PIP) install -r requirements/serve.txt; else $(PIP) install -e '.[serve]'; fi
	@touch $@

# ---- use -----------------------------------------------------------------------------------------

# DATA is read from the environment: make hands on the variables of its command line. Who gives DATA
# or ARGS has seen the demo.
quickstart: setup ## 6 minutes: a demo, then sinpos and cape on number lists; DATA=train.en,train.de for your text
	$(if $(DATA)$(ARGS),,$(BIN)/cape-plugins demo --seeds 1 --compare sinpos relpos cape)
	$(BIN)/python -m recipes.mt.quickstart $(ARGS)

bench: setup-serve ## runs the benchmarks; ARGS= has options
	$(BIN)/python -m benchmarks.run $(ARGS)

# ---- checks --------------------------------------------------------------------------------------
# Two workers with one thread each: the tests are small and many, and torch's threads would only
# fight for the cores. A file stays on one worker, because its tests share what it has trained;
# tests/conftest.py says in which order the files come.

PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 \
    $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: setup-serve lint ## runs ruff and all tests; ARGS= has options of pytest
	$(PYTEST) $(ARGS)

test-fast: setup-serve ## runs the tests that start no command lines and train nothing long
	$(PYTEST) -m "not slow" $(ARGS)

# Workers share the card. Tests go to them one by one, because some compile for half a minute.
GPU_WORKERS ?= 8
GPU_RESULTS ?= results/gpu-check
GPU_BENCH := $(BIN)/python -m benchmarks.run --device cuda --output $(GPU_RESULTS)

gpu-check: setup-hf ## tests and measures on a GPU: tests/gpu, then benchmarks into results/gpu-check
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest tests/gpu \
	    -n $(GPU_WORKERS) --dist load --maxschedchunk 1 --durations 10 $(ARGS)
	$(GPU_BENCH) training relative attention --warm-up 3 --rounds 10
	$(GPU_BENCH) relative attention --warm-up 5 --rounds 30 --dtype float16

# The fast tests of Hugging Face models on the oldest tested release of transformers and on the newest
# one of the package index, each in a folder in front of the environment; RELEASES="5.21.1 5.22.2"
# for others. Without ARGS it writes hf_models/tested.json, from which setup.py takes the range.
test-versions: setup-serve ## runs the fast tests of Hugging Face models on the oldest and the newest transformers
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m tests.versions $(RELEASES) \
	    --pytest "-n $(WORKERS) --dist loadfile --no-loadscope-reorder" $(if $(ARGS),--choose "$(ARGS)")

# The tests that transformers has for all its models, of the installed version; the last line says
# what was run and what was left out. ARGS="--position-embedding relpos" for another type.
test-hf-common: setup-hf ## runs transformers' common tests of models on the models of this package
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.hf_common.run $(ARGS)

lint: setup ## runs ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup ## runs ruff, which repairs what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# ---- release -------------------------------------------------------------------------------------

# build/lib keeps modules that were deleted since, and setuptools would put them into the wheel
wheel: setup ## builds the package into dist
	rm -rf build/lib build/bdist.*
	$(BIN)/python -m build --no-isolation --outdir dist .

# build/ also holds the models of the quickstart; distclean takes these, too
clean: ## removes what was built
	rm -rf build/lib build/bdist.* dist *.egg-info .pytest_cache .ruff_cache
	find $(wildcard $(PACKAGES) recipes benchmarks tests) -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## also removes .venv and build, with the models of the quickstart
	rm -rf build $(VENV)
