# Everything runs in a virtual environment that make sets up by itself.
#   make demo    train on real data with strategy="skip_reduce" on several processes
#   make bench   a short comparison over emulated slow networks, and limits of time (Linux; a quiet machine)
#   make test    the tests; those of one process on JOBS processors
#   make docs    the documentation site, in docs/_build/html
#   make results the page of results and its figures, from the runs stored in docs/benchmarks
#   make check   what CI runs: lint, types, tests
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
JOBS ?= 2

.PHONY: setup demo bench test docs results lint types check format clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 10) else "lightning_sparse needs Python 3.10 or newer; this is " + sys.version.split()[0] + ". Choose another: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

demo: setup
	$(BIN)/python examples/demo.py

bench: setup
	$(BIN)/lightning-sparse bench --emulate 2x1gbit,2x100mbit --workload mlp_1m \
	  --strategies ddp,bf16_hook,skip_reduce,skip_reduce:wire_dtype=bfloat16 --steps 5 --rounds 3 --plot
	$(BIN)/python -m pytest tests/bench/speed.py

test: setup
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not processes and not cluster"
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "processes or cluster"

docs: setup
	$(BIN)/python -m sphinx -W --keep-going -n -q docs docs/_build/html

results: setup
	$(BIN)/python docs/figures/results.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

check: lint types test

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
