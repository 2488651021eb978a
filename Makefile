# Every target works from a fresh clone: what it needs is installed into .venv first.
# Another interpreter: make install PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
OLDEST := .venv-oldest
NEWEST := .venv-newest
WORKERS ?= 4

# Kept for every command: no network calls, one thread a process (several processes share the cores).
export OMP_NUM_THREADS := 1
export WANDB_MODE := offline
export WANDB_SILENT := true
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
export NO_MKDOCS_2_WARNING := 1

.DEFAULT_GOAL := help
.PHONY: help install python demo test test-all oldest newest gpu bench exhaustive soak lint docs clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP) ## create .venv and install the package with everything the other targets need

# $(1): the environment, $(2): the versions
define install_into
@$(MAKE) --no-print-directory --silent python
@test -x $(1)/bin/pip || $(PYTHON) -m venv $(1)
$(1)/bin/pip install --disable-pip-version-check --quiet -c $(2) \
	-e '.[dev,recipes]' torchdata tensorboard
@touch $@
endef

$(STAMP): pyproject.toml constraints.txt
	$(call install_into,$(VENV),constraints.txt)

$(OLDEST)/.installed: pyproject.toml constraints-oldest.txt
	$(call install_into,$(OLDEST),constraints-oldest.txt)

# As constraints.txt, but for the packages whose private names are used, and what they pin themselves.
$(NEWEST)/.installed: pyproject.toml constraints.txt
	@mkdir -p $(NEWEST)
	@grep -vE '^(torch|lightning|pytorch-lightning|torchmetrics|setuptools)==' constraints.txt > $(NEWEST)/constraints.txt
	$(call install_into,$(NEWEST),$(NEWEST)/constraints.txt)

python:
	@command -v $(PYTHON) >/dev/null || { echo "make: '$(PYTHON)' is not installed. Install Python 3.11 or newer (Debian, Ubuntu: apt-get install python3 python3-venv), or name one: make install PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: $$($(PYTHON) --version) is too old. Python 3.11 or newer is needed; name one: make install PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "make: '$(PYTHON)' cannot create virtual environments. Debian, Ubuntu: apt-get install python3-venv"; exit 1; }

demo: install ## train a small GPT on 4 processes laid out as two clusters (about 3 minutes on 2 cores)
	PYTHONWARNINGS=ignore::DeprecationWarning,ignore::FutureWarning TORCH_CPP_LOG_LEVEL=ERROR \
		$(BIN)/lightning-holmes fit --config recipes/gpt_tiny/config.yaml

# More workers than cores: processes that form a job wait for each other about half of the time, and for what fails.
test: install ## every promise by at least one fit, in a few minutes; tests/full.py says what is left out
	$(BIN)/python -m pytest -n $(WORKERS) --dist=loadgroup -m 'not benchmark and not full'

test-all: test ## all tests but those of speed: `make test`, then the rest; large products of cases pairwise
	$(BIN)/python -m pytest -n $(WORKERS) --dist=loadgroup -m 'full and not benchmark'

# What touches private names of torch and Lightning, and small fits of each kind.
on_versions = $(1)/bin/python -m pytest -n $(WORKERS) --dist=loadgroup -m 'versions and not benchmark'

oldest: $(OLDEST)/.installed ## run what touches private names of torch and Lightning on the oldest versions that pyproject.toml promises
	$(call on_versions,$(OLDEST))

newest: $(NEWEST)/.installed ## the same on the newest torch, Lightning and torchmetrics that pip finds within these promises
	$(call on_versions,$(NEWEST))

gpu: ## on a machine with a GPU: parity, faults, speed, memory in at most 8 minutes (PART="parity mfu": only these)
	$(PYTHON) tests/gpu/gpu_script.py $(PART)

bench: install ## measure speeds and compare them with what is promised; alone on the machine, and no part of CI
	$(BIN)/python -m pytest -n 0 -s -m benchmark

exhaustive: PART ?= 1/1
exhaustive: install ## run every case of the large products (hours; PART=2/10: a tenth), and log each in runs/exhaustive.log
	HOLMES_EXHAUSTIVE=$(PART) $(BIN)/python -m pytest -n $(WORKERS) --dist=loadgroup tests/parity tests/lightning_contract \
		tests/checkpoint/test_kills.py tests/strategy/test_optimizer_nodes.py \
		tests/plan/search/test_alike.py tests/fuzz

SOAK ?= --minutes 60 --steps 10000

soak: install ## random faults on jobs that are started again (an hour; SOAK="--seed 5 --runs 1": one again)
	$(BIN)/python tests/soak/soak.py $(SOAK)

lint: install ## ruff (rules and format) and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict lightning_holmes

docs: install ## build the documentation into site/, warnings are errors
	$(BIN)/mkdocs build --strict

clean: ## remove what the other targets made: environment, caches, runs
	rm -rf $(VENV) $(OLDEST) $(NEWEST) site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis wandb lightning_logs runs
	find lightning_holmes tests recipes -name __pycache__ -type d -prune -exec rm -rf {} +
