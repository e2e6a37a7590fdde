PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PIP := $(BIN)/pip install --disable-pip-version-check --constraint constraints.txt

# Without it, each process that the tests start compiles the package again, and each test process the tests.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install demo demo-cluster bench-hosts test test-fast trial check sizes format docs bench-planner bench-runtime bench-gpu bench-models bench-accuracy profiles pictures gallery fuzz chaos dist clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

install: $(INSTALLED) ## make .venv with pinned versions and every extra that the tests need

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@echo "step 1 of 3: torch (about 200 MB)"
	$(PIP) torch==2.13.0
	@echo "step 2 of 3: runtimes, solvers and tools (about 400 MB)"
	$(PIP) --editable '.[test,docs]'
	@echo "step 3 of 3: machine code of the planners (about 30 s)"
	$(BIN)/python -m autosplit.planners.warming
	@touch $@

# Tests of a file share a traced and measured model, so one process runs them all; long files are not last by name. Three processes
# on two cores, because tests wait for workers: two left a fifth of the cores idle.
PYTEST := $(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder
DEMO := autosplit-run
kept = --profiles $(DEMO)/profiles -o $(DEMO)/$(1).yaml --picture $(DEMO)/$(1).svg --report $(DEMO)/$(1).html

demo: install ## a small model within 90 s, then a ResNet-50 and a BERT-base class model; at last BERT under a memory cap
	$(BIN)/autosplit auto "autosplit.examples.unet:unet?levels=3&size=64" --backend eager,onnxruntime --budget 5s --rounds 3 $(call kept,unet)
	$(BIN)/autosplit auto transformers:ResNetForImageClassification --budget 20s $(call kept,resnet50)
	$(BIN)/autosplit auto transformers:BertModel --seq-len 128 --budget 20s $(call kept,bert)
	@echo "Two equal cores and a model that fits: replicas win. Now each core may hold 400 MB, less than BERT's weights: a split wins."
	$(BIN)/autosplit auto transformers:BertModel --seq-len 128 --devices cpu:0,cpu:1 --memory 400MB --backend eager --budget 10s --peers $(call kept,capped)
	@echo "Plans, pictures and report pages are in $(DEMO)/. Run a plan again: $(BIN)/autosplit run $(DEMO)/bert.yaml"

demo-cluster: install ## three Ray nodes on this machine, a BERT over them, one node killed half-way
	$(BIN)/python -m benchmarks.clusterdemo

test: install ## every test, with the examples in documents, docstrings and notebooks
	$(PYTEST)

test-fast: install ## the tests of values, costs and planners, which need no torch
	$(PYTEST) tests/values tests/costs tests/planners tests/planning

trial: install ## the first hour of a new user, item by item: the tests of tests/trial.txt
	$(PYTEST) $$(grep -o 'tests/[^ ]*\.py[^ ]*' tests/trial.txt)

docs: install ## the documentation as a site in build/docs; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

check: install ## ruff, mypy --strict, directions of imports, and lines of folders
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layers.py tests/test_sizes.py

sizes: ## lines of each folder beside its limit in sizes.toml; it installs nothing
	@$(PYTHON) tests/linecounts.py

format: install ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-planner: install ## planner table: workload, reference value, ours, bound, gap, seconds
	$(BIN)/python -m benchmarks.planner

bench-runtime: install ## ring, empty stages, peers, soak
	$(BIN)/python -m benchmarks.runtime

bench-gpu: install ## accelerators kept busy, smaller than the model, and several of them: on a card, else simulated
	$(BIN)/python -m benchmarks.gpu

bench-models: install ## the best way to run each model here
	$(BIN)/python -m benchmarks.models

bench-accuracy: install ## predicted against measured: 8 models, 3 backends, 3 shapes of plans
	$(BIN)/python -m benchmarks.accuracy

bench-hosts: install ## transports between two hosts, a model over them beside other systems, an idle cluster
	$(BIN)/python -m benchmarks.hosts

chaos: install ## storms of kills, stops, hangs, crashes and callers on 1 to 8 workers and in the own process, for about eight minutes: all counts must be 0
	$(BIN)/python -m benchmarks.chaos

profiles: install ## measure the committed profiles again on this machine
	$(BIN)/python -m benchmarks.make_profiles

pictures: install ## make the pictures of docs/pictures again, on a quiet machine with Chromium
	$(BIN)/python -m benchmarks.pictures

gallery: install ## run the notebooks, and keep their outputs for the documentation
	$(BIN)/python -m benchmarks.gallery

fuzz: install ## 2,000 mutations of each kind of file, archive, bundle and message from another host, hostile calls of each operator, and all cases of properties
	AUTOSPLIT_FUZZ_CASES=2000 $(BIN)/python -m pytest -q $(wildcard tests/test_hostile_*.py tests/*/test_hostile_*.py) tests/bundling/test_native.py tests/tracing/test_operators.py $(shell grep -rlE 'from (fuzzing|hypothesis) import' tests --include=test_*.py)

dist: ## source distribution and wheel in build/dist, and a run of the wheel in a bare environment
	rm -rf build/dist build/bare && mkdir -p build/dist
	$(PYTHON) -m venv build/bare
	build/bare/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt build
	build/bare/bin/python -m build --outdir build/dist .
	build/bare/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch==2.13.0
	build/bare/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt build/dist/*.whl
	cd build/bare && bin/autosplit --version && bin/autosplit auto "autosplit.examples.mlp:mlp?depth=2&width=64" --devices cpu:0 --backend eager --budget 1s --profiles profiles

clean: ## remove what was built
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
