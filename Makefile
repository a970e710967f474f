# The one set of commands, for people and for CI. `make serve` on a fresh clone is all it takes to try Twinpool.

PYTHON ?= python3
BIN := .venv/bin
CONSTRAINTS := constraints/cpu.txt

.DEFAULT_GOAL := help
.PHONY: help serve test test-all check format bench soak mutants mutation-sweep test-numerics pages demo-model test-rayup setup clean

help: ## show the commands
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|'

serve: .venv/.installed ## start the demo cluster; ARGS="--model DIR --decode 2" for another
	@$(BIN)/twinpool serve --model demo $(ARGS)

# Tests start hundreds of processes: each would compile the program anew where the environment forbids to keep bytecode.
export PYTHONDONTWRITEBYTECODE =

# A process that crashes ends the run: were it replaced, tests would be left that nobody runs, and the run had no end.
PYTEST := $(BIN)/python -m pytest -n 3 --no-loadscope-reorder --max-worker-restart 0

test: .venv/.installed-dev ## run the tests that a change needs, three at a time; ARGS="-n0 tests/cluster -k drain" for some, in order
	@$(PYTEST) -m "not soak and not thorough" $(ARGS)

test-all: .venv/.installed-dev ## run all tests but the soak, as CI does: also all parameters of slow tests and those of tests/thorough.txt
	@$(PYTEST) -m "not soak" $(ARGS)
	@.ci/numerics

test-numerics: .venv/.installed-dev ## run the tests of numerics as other processors would: each level below this one that it can show
	@.ci/numerics $(ARGS)

check: .venv/.installed-dev ## lint, format, types, import layers, unused code, sizes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/unused.py
	$(BIN)/python .ci/house_numbers.py

format: .venv/.installed-dev ## put the code into its format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: .venv/.installed-dev ## measure the engine, the data planes and the demo cluster; ARGS="serve --long", ARGS=--list
	@$(BIN)/python -m bench $(ARGS)

mutants: .venv/.installed-dev ## show that tests fail when a hazard's rule is broken or a likely mistake is made; ARGS="a1 b" for some
	@$(BIN)/python tests/mutants/run.py $(ARGS)

mutation-sweep: .venv/.installed-dev ## break hundreds of places one by one, and see whether a test notices; ARGS="--hours 1", "report"
	@$(BIN)/python tests/mutants/sweep.py $(ARGS)

soak: .venv/.installed-dev ## the long tests: the full product of settings, and torture
	@$(BIN)/python -m pytest -m soak $(ARGS)

pages: .venv/.installed-dev ## write what is made from the source anew: pages of docs/ (configuration, states, api, metrics, families), the dashboard
	@mkdir -p build
	@PYTHONPATH=. $(BIN)/python docs/configuration.py >build/page && mv build/page docs/configuration.md
	@PYTHONPATH=. $(BIN)/python docs/state_diagrams.py >build/page && mv build/page docs/states.md
	@PYTHONPATH=. $(BIN)/python docs/api_reference.py >build/page && mv build/page docs/api.md
	@PYTHONPATH=. $(BIN)/python docs/metrics.py >build/page && mv build/page docs/metrics.md
	@$(BIN)/python -m tests.repository.family_table >build/page && mv build/page docs/families.md
	@$(BIN)/python deploy/grafana/dashboard.py >build/page && mv build/page deploy/grafana/dashboards/twinpool.json

demo-model: .venv/.installed-dev ## train the demo checkpoint again from its seed (up to 90 minutes)
	$(BIN)/python -m bench.demo_model.prepare_corpus --output build/demo-model/corpus
	$(BIN)/python -m bench.demo_model.train --corpus build/demo-model/corpus --work build/demo-model/work --output build/demo-model/model --minutes 90

test-rayup: .venv/.installed-dev ## launch real Ray clusters through ssh, use them, take them down; ARGS=--loopback or --apart for one of them
	@$(BIN)/python -m tests.rayup.rayup $(ARGS)

setup: .venv/.installed-dev ## make the environment with everything in it

clean: ## remove the environment and all caches
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is newer than what it was made from, so that a second run installs nothing.
.venv/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 11) <= v <= (3, 13) or sys.exit("Twinpool needs Python 3.11 to 3.13, $(PYTHON) is %d.%d: make PYTHON=python3.12 ..." % v)'
	@$(PYTHON) -m venv .venv

.venv/.installed: pyproject.toml $(CONSTRAINTS) | .venv/bin/python
	@.ci/install $(CONSTRAINTS) -e .
	@touch $@

.venv/.installed-dev: pyproject.toml $(CONSTRAINTS) | .venv/bin/python
	@.ci/install $(CONSTRAINTS) -e '.[dev]'
	@touch $@ .venv/.installed
