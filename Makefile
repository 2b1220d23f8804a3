# Each target sets itself up: the first one that runs makes .venv, and a change of the pins or of pyproject.toml renews it.

PYTHON ?= python3
PYTEST_WORKERS ?= 2
# Options of `make categories`, such as --questions or --batch.
BENCH ?=
# Where `make drafters` puts them.
DRAFTERS ?= build/drafters
BIN := .venv/bin
NEWEST := .venv-newest

# Forked tokenizers warn, and a warning fails a test.
export TOKENIZERS_PARALLELISM := false
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# One thread a worker: two workers with two threads each stall one another on two cores. What measures time runs by
# itself afterwards. $(1): the python, $(2): a marker expression in front.
define pytest
OMP_NUM_THREADS=1 $(1) -m pytest -n $(PYTEST_WORKERS) -m "$(2)not timing"
OMP_NUM_THREADS=1 $(1) -m pytest -m "$(2)timing"
endef

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-newest support check fix bench categories drafters

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

demo: .venv/ready ## the main job on a real model: text as it comes, and a table of speeds
	$(BIN)/python -m hf_specgen.bench.demo

test: .venv/ready ## the tests, without the slow corners
	$(call pytest,$(BIN)/python,not slow and )

test-all: .venv/ready ## all tests
	$(call pytest,$(BIN)/python,)

test-newest: $(NEWEST)/ready ## the tests with the newest transformers there is
	$(NEWEST)/bin/python -m pip install -q -U -c $(NEWEST)/constraints.txt 'transformers<6'
	$(call pytest,$(NEWEST)/bin/python,not slow and )

support: .venv/ready ## writes docs/support.md: what each model family of transformers does
	SUPPORT=write OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(PYTEST_WORKERS) -m "" tests/test_families.py -k the_page_says

check: .venv/ready ## lint, format and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

fix: .venv/ready ## what lint and format can mend by themselves
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: .venv/ready ## the measurements
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[bench]"
	$(BIN)/python -m hf_specgen.bench

categories: .venv/ready ## the same over categories of questions, in an hour or two; goes on where it was stopped
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[bench]"
	$(BIN)/python -m hf_specgen.bench.categories --out build/categories.jsonl $(BENCH)

# $(1): a script of training/, $(2): its folder under DRAFTERS, $(3): what else it is told.
define trained
target=$$($(BIN)/python -m hf_specgen.bench.smollm2) && $(BIN)/python training/$(1).py --target "$$target" \
	--data $(DRAFTERS)/data --output_dir $(DRAFTERS)/$(2) --resume $(3)
endef

drafters: .venv/ready ## data and three drafters for the demo's model from nothing, in two hours; goes on where it was stopped
	target=$$($(BIN)/python -m hf_specgen.bench.smollm2) && $(BIN)/python training/generate_data.py --target "$$target" \
		--out $(DRAFTERS)/data --minutes 28 --tokens 170000 --hidden_layers eagle3
	$(call trained,train_medusa,medusa,--num_train_epochs 5 --save_dtype float16)
	$(call trained,train_eagle,eagle3,--num_train_epochs 4 --draft_vocabulary 3584 --save_dtype float16)
	$(call trained,distill_drafter,sibling,--num_train_epochs 2 --layers 8)

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[dev]"
	touch $@

$(NEWEST)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(NEWEST)
	grep -v '^transformers==' constraints.txt > $(NEWEST)/constraints.txt
	$(NEWEST)/bin/python -m pip install -q -c $(NEWEST)/constraints.txt torch
	$(NEWEST)/bin/python -m pip install -q -c $(NEWEST)/constraints.txt -e ".[dev]"
	touch $@
