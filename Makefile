# Every target works from a fresh clone: what it needs is installed into .venv first.
# Another interpreter: make install PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Kept for every command: no network calls, one thread a process (several processes share the cores).
export OMP_NUM_THREADS := 1
export WANDB_MODE := offline
export WANDB_SILENT := true
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
export NO_MKDOCS_2_WARNING := 1

.DEFAULT_GOAL := help
.PHONY: help install demo test lint docs clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP) ## create .venv and install the package with everything the other targets need

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "make: '$(PYTHON)' is not installed. Install Python 3.10 or newer (Debian, Ubuntu: apt-get install python3 python3-venv), or name one: make install PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "make: $$($(PYTHON) --version) is too old. Python 3.10 or newer is needed; name one: make install PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "make: '$(PYTHON)' cannot create virtual environments. Debian, Ubuntu: apt-get install python3-venv"; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check --quiet -c constraints.txt \
		-e '.[dev,hf,lora,data,plot,testbed]' torchdata tensorboard
	@touch $@

demo: install ## train a small GPT on 4 processes laid out as two clusters (about 3 minutes on 2 cores)
	PYTHONWARNINGS=ignore::DeprecationWarning,ignore::FutureWarning TORCH_CPP_LOG_LEVEL=ERROR \
		$(BIN)/lightning-holmes fit --config recipes/gpt_tiny/config.yaml

# Tests that time something run by themselves, after the others. They are run even if the others
# fail, and either failure counts; pytest's 5 ("no tests collected") does not count for the second.
test: install ## run every test that CI runs
	@rc=0; \
	$(BIN)/python -m pytest -n 2 --dist=loadgroup -m 'not benchmark' || rc=$$?; \
	bench=0; \
	$(BIN)/python -m pytest -n 0 -s -m benchmark || bench=$$?; \
	if [ $$bench -ne 0 ] && [ $$bench -ne 5 ]; then rc=$$bench; fi; \
	exit $$rc

lint: install ## ruff (rules and format) and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict lightning_holmes

docs: install ## build the documentation into site/, warnings are errors
	$(BIN)/mkdocs build --strict --quiet

clean: ## remove what the other targets made: environment, caches, runs
	rm -rf $(VENV) site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis wandb lightning_logs runs
	find lightning_holmes tests recipes -name __pycache__ -type d -prune -exec rm -rf {} +
