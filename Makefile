# Everything runs in a virtual environment that make sets up by itself.
#   make demo    train on four hosts over an emulated slow network, with ddp and with sparse_auto
#   make bench   a short comparison over emulated slow networks, and limits of time (Linux; a quiet machine)
#   make test    the tests; those of one process on JOBS processors
#   make programs  the tests of whole programs (demo, examples, notebook, documentation, bench on a cluster) and of long trainings
#   make packages  other people's models with ddp and with these strategies, in virtual environments of their own
#   make docs    the documentation site, in docs/_build/html
#   make results the page of results and its figures, from the summaries of runs in docs/benchmarks
#   make check   what CI runs: lint, types, tests, programs
#   make dist    the wheel and the source distribution, in dist
# The demo needs no GPU: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu makes pip fetch the smaller torch on Linux.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
JOBS ?= 2
CONSTRAINTS ?= constraints.txt

PACKAGES ?= litgpt scvi-tools pytorch-forecasting neuralforecast darts chemprop

.PHONY: setup demo bench test programs packages docs results lint types check dist format clean

setup: $(VENV)/.ready

# What users install, which is all that the demo needs.
$(VENV)/.demo: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 10) else "lightning_sparse needs Python 3.10 or newer; this is " + sys.version.split()[0] + ". Choose another: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --constraint $(CONSTRAINTS) --editable .
	touch $@

# Tests, documentation and tools.  Where there is no torchft, the tests of elastic trainings are skipped.
$(VENV)/.ready: $(VENV)/.demo
	$(BIN)/python -m pip install --constraint $(CONSTRAINTS) --editable ".[dev]"
	-$(BIN)/python -m pip install --constraint $(CONSTRAINTS) --editable ".[elastic]"
	touch $@

demo: $(VENV)/.demo
	$(BIN)/python examples/demo.py

bench: setup
	$(BIN)/lightning-sparse bench --emulate 2x1gbit,2x100mbit --workload mlp_1m \
	  --strategies ddp,bf16_hook,skip_reduce,skip_reduce:wire_dtype=bfloat16 --steps 5 --rounds 3 --plot
	$(BIN)/python -m pytest tests/bench/speed.py

# A worker that dies ends the run: --dist loadgroup waits for ever where one is replaced (pytest-xdist #1378).
test: setup
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not processes and not cluster and not programs"
	$(BIN)/python -m pytest -n 2 --dist loadgroup --max-worker-restart 0 -m "(processes or cluster) and not programs"

programs: setup
	$(BIN)/python -m pytest -n 2 --dist loadgroup --max-worker-restart 0 -m programs

# One environment a package: they ask for different versions of the same things.  Darts leaves PyTorch to an extra.
packages: $(PACKAGES:%=package-%)

package-%:
	$(PYTHON) -m venv $(VENV)-$*
	$(VENV)-$*/bin/python -m pip install --constraint tests/constraints/packages.txt --editable . "$(*:darts=darts[torch])"
	$(VENV)-$*/bin/python tests/packages/run.py $*

docs: setup
	$(BIN)/python -m sphinx -W --keep-going -n -q docs docs/_build/html

results: setup
	$(BIN)/python docs/figures/results.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The second: what a user's own code is told by the installed package, which must say that it has types (py.typed).
types: setup
	$(BIN)/mypy
	cd examples && $(abspath $(BIN))/mypy --config-file= --cache-dir ../.mypy_cache/user --strict \
	  -c 'import lightning_sparse as ls; strategy: ls.SparseDDPStrategy = ls.SparseDDPStrategy(ls.MiCRO(density=0.05))'

check: lint types test programs

dist: setup
	rm -rf dist
	$(BIN)/python -m build

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(VENV)-* dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
