# make run    everything set up, llama-server and slotpin started
# make test   everything set up, all checks and tests run
#
#   MODEL=FILE  a GGUF model of your own for make run
#   ARGS=...    further arguments of slotpin up

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SETUP := pyproject.toml constraints.txt

.PHONY: run test lint clean

run: $(STAMP)
	@exec $(BIN)/slotpin up $(if $(MODEL),--model "$(MODEL)") $(ARGS)

test: lint
	$(BIN)/python -m pytest $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(STAMP): $(SETUP)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "slotpin needs Python 3.11 or newer: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "this Python has no venv: apt-get install python3-venv" >&2; exit 2; }
	@echo "setting up $(VENV)" >&2
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
