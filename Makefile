# Everything a newcomer needs: `make demo` to see it run, `make test` to prove it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.headrace-setup

.PHONY: setup demo test check lock clean

setup: $(STAMP)

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 13) else f"Headrace needs Python 3.11 or 3.12, got {v[0]}.{v[1]}; run: make PYTHON=python3.12 $(MAKECMDGOALS)")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "uv>=0.9"
	$(BIN)/uv pip sync --quiet --compile-bytecode --python $(BIN)/python requirements.lock
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --editable .
	$(BIN)/python -m compileall -q schemas streams offline jobs infra
	touch $(STAMP)

demo: setup
	$(BIN)/headrace demo

# In the order of the files, the long ones (chaos) first and the short ones (unit) last: none is left to the end alone.
test: setup
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

lock: setup
	$(BIN)/uv pip compile pyproject.toml --quiet --universal --python-version 3.11 --all-extras --group dev --generate-hashes --no-header --no-annotate --no-emit-find-links --output-file requirements.lock

clean:
	rm -rf $(VENV) .headrace build dist
