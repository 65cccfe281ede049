# The two commands that matter: `make train` and `make test`. Each sets up its own virtual environment first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
RUN ?= runs/$(shell date +%Y%m%d-%H%M%S)

FLOWER := .venv-flower
RAY := .venv-ray
SPARK := .venv-spark

.PHONY: setup train test test-all test-gpu test-flower test-ray test-spark mutants fuzz lint types bench docs wheel release clean

setup: $(STAMP)

$(STAMP): pyproject.toml lab/pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt "setuptools>=77" wheel torch
	$(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation -c constraints.txt -e ".[dev]" -e lab
	touch $(STAMP)

train: setup
	$(BIN)/dpfy train --out $(RUN)
	$(BIN)/dpfy verify $(RUN)

lint: setup
	$(BIN)/ruff check dpfy lab tests benchmarks examples tools
	$(BIN)/ruff format --check dpfy lab tests benchmarks examples tools

types: setup
	$(BIN)/mypy

test: lint types
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist loadfile --no-loadscope-reorder

test-all: lint types
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist loadfile --no-loadscope-reorder -m "not gpu"

test-gpu: setup
	$(BIN)/pytest -m "not slow" tests/gradients tests/noise tests/training/test_correlated.py tests/isolation/test_mixing_cuda.py tests/training/integrity/test_spent.py

# Flower needs older typer, rich, starlette and uvicorn than the suite has: its tests have an environment of their own.
$(FLOWER)/.ready: pyproject.toml constraints.txt
	test -x $(FLOWER)/bin/python || $(PYTHON) -m venv $(FLOWER)
	grep -vE '^(typer|rich|packaging|starlette|uvicorn)==' constraints.txt > $(FLOWER)/constraints.txt
	$(FLOWER)/bin/pip install --quiet --disable-pip-version-check -c $(FLOWER)/constraints.txt "setuptools>=77" wheel torch pytest
	$(FLOWER)/bin/pip install --quiet --disable-pip-version-check --no-build-isolation -c $(FLOWER)/constraints.txt -e ".[flower]" "flwr[simulation]"
	touch $(FLOWER)/.ready

test-flower: $(FLOWER)/.ready
	OMP_NUM_THREADS=1 $(FLOWER)/bin/pytest -m "not gpu" tests/integrations/flower

# Ray is large, and starts processes of its own: its tests have an environment of their own.
$(RAY)/.ready: pyproject.toml constraints.txt
	test -x $(RAY)/bin/python || $(PYTHON) -m venv $(RAY)
	grep -vE '^(packaging|pyarrow|pandas)==' constraints.txt > $(RAY)/constraints.txt
	$(RAY)/bin/pip install --quiet --disable-pip-version-check -c $(RAY)/constraints.txt "setuptools>=77" wheel torch pytest
	$(RAY)/bin/pip install --quiet --disable-pip-version-check --no-build-isolation -c $(RAY)/constraints.txt -e ".[ray]"
	touch $(RAY)/.ready

test-ray: $(RAY)/.ready
	OMP_NUM_THREADS=1 $(RAY)/bin/pytest -m "not gpu" tests/integrations/ray

# Spark is large and needs Java 17: its tests have an environment of their own.
$(SPARK)/.ready: pyproject.toml constraints.txt
	test -x $(SPARK)/bin/python || $(PYTHON) -m venv $(SPARK)
	$(SPARK)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt "setuptools>=77" wheel torch
	$(SPARK)/bin/pip install --quiet --disable-pip-version-check --no-build-isolation -c constraints.txt -e ".[dev,spark]"
	touch $(SPARK)/.ready

test-spark: $(SPARK)/.ready
	OMP_NUM_THREADS=1 $(SPARK)/bin/python -m pytest -m "not gpu" tests/integrations/spark

fuzz: setup
	$(BIN)/python tests/fuzz/fuzzer.py commands --seed $(or $(SEED),1) --start $(or $(START),0) --count $(or $(COUNT),10000)
	$(BIN)/python tests/fuzz/fuzzer.py files --seed $(or $(SEED),1) --start $(or $(START),0) --count $(or $(COUNT),5000)

mutants: setup
	$(BIN)/python tests/mutants/run.py

docs: setup
	$(BIN)/python tools/reference.py --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python tools/links.py build/site
	OMP_NUM_THREADS=1 $(BIN)/python tools/blocks.py
	@echo "look at it: python -m http.server -d build/site"

wheel: setup
	$(BIN)/python tools/package.py

# Wheels, sdists, a bill of materials and hashes, with the same bytes each time; KEY=me.pem signs them.
release: setup
	$(BIN)/python tools/release.py dist $(if $(KEY),--key $(KEY))

bench: setup
	$(BIN)/python benchmarks/accounting.py
	$(BIN)/python benchmarks/step.py

clean:
	rm -rf $(VENV) build dist *.egg-info lab/build lab/*.egg-info .mypy_cache .ruff_cache .pytest_cache
