# make train   set up, then run the main job; flags: make train ARGS="--discipline lock-free"
# make test    set up, then the tests (minutes); make test-all: the long ones too, with Lightning and transformers
# make test-trackers  with Weights & Biases, MLflow and Trackio, in an environment of their own
# make test-ray  what needs Ray, on three nodes that are all this machine (minutes)
# make chaos   runs under a virtual clock with everything going wrong, then real processes, disks and
#              networks, row by row: make chaos SEEDS=100000 FAULTS="--rows 1,2 --trials 100"
# make check   formatting, lint and types
# make setup   only the virtual environment; make clean removes it, and that of the trackers

PYTHON ?= python3
# so many of the ordinary tests at a time
JOBS ?= 2
# so many runs under a virtual clock
SEEDS ?= 100000
# how long those on Ray may take
RAY_LIMIT ?= 20m
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
LIBRARIES := $(VENV)/.libraries
RAY := $(VENV)/.ray
TRACKERS := .venv-trackers
TRACKERS_READY := $(TRACKERS)/.ready

.PHONY: setup train test test-all test-trackers test-ray chaos check format clean

setup: $(READY)

# The stamp is written last, so a set-up that was broken off is done again.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Offbeat needs Python 3.11 or newer; try make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

# What the examples of people's own scripts are written with; only the long tests run them.
$(LIBRARIES): $(READY)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,lightning,transformers,torchdata]'
	@touch $@

$(RAY): $(READY)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,ray,kuberay]'
	@touch $@

# They ask for versions that constraints.txt does not have.
$(TRACKERS_READY): pyproject.toml constraints-trackers.txt
	$(PYTHON) -m venv $(TRACKERS)
	$(TRACKERS)/bin/pip install --quiet --constraint constraints-trackers.txt --editable '.[wandb,mlflow,trackio]' pytest
	@touch $@

train: $(READY)
	@$(BIN)/offbeat train $(ARGS)

test: $(READY)
	$(BIN)/pytest -n $(JOBS) --dist worksteal -m 'not slow and not ray' $(ARGS)

# Some of the long ones look at how workers come in each other's way: nothing runs beside them.
test-all: test test-trackers $(LIBRARIES)
	$(BIN)/pytest -m slow $(ARGS)

test-trackers: $(TRACKERS_READY)
	$(TRACKERS)/bin/pytest tests/run/test_trackers.py

# One cluster after the other: each is three nodes' worth of processes. Ray waits for ever for some
# things; this does not.
test-ray: $(RAY)
	timeout --kill-after=30s $(RAY_LIMIT) $(BIN)/pytest -m ray $(ARGS)

chaos: $(READY)
	$(BIN)/python scripts/chaos.py --seeds $(SEEDS) $(ARGS)
	$(BIN)/python scripts/faults.py $(FAULTS)

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) $(TRACKERS)
