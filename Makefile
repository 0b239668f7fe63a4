# `make demo` and `make test` work on a fresh machine that has Python 3.11+ and make. The environment is made once, in
# .venv; a stamp file in it says that it is complete, so a second call installs nothing.

VENV := .venv
BIN := $(VENV)/bin
DEMO_STAMP := $(VENV)/.ready-demo
TEST_STAMP := $(VENV)/.ready-test
INSTALL := PYTHON='$(PYTHON)' VENV='$(VENV)' sh requirements/install.sh
PINS := pyproject.toml requirements/constraints.txt requirements/install.sh
MODEL := models/SmolLM2-135M-Instruct

# Three test processes of one thread each on two cores, since tests with a Ray cluster wait most of the time. Those go to two
# of the processes, with a cluster each for the session. No call leaves the machine. Each way to deploy is among the
# tests, one after another in a process, where it can run (root; the launcher: sshd, rsync); what takes minutes only in
# make test-deploy.
QUIET := RAY_USAGE_STATS_ENABLED=0 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

.PHONY: demo test test-deploy test-gpu bench lint format model clean
.DELETE_ON_ERROR:

$(DEMO_STAMP): $(PINS)
	@$(INSTALL) demo
	@touch $@

$(TEST_STAMP): $(PINS)
	@$(INSTALL) test
	@touch $(DEMO_STAMP) $@

model: $(DEMO_STAMP)
	@$(QUIET) $(BIN)/python -m launch.convert --target $(MODEL)

demo: model
	@$(QUIET) $(BIN)/python -m launch generate --config configs/demo.yaml --overwrite

test: $(TEST_STAMP)
	@$(QUIET) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadgroup -m 'not soak and not deploy_long and (deploy or not slow)' $(PYTEST_ARGS)

test-deploy: $(TEST_STAMP)
	@$(QUIET) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m deploy tests/deploy $(PYTEST_ARGS)

# On a machine with a GPU: the tests that need one, and every benchmark that it can run (about 30 minutes).
test-gpu: $(TEST_STAMP)
	@$(QUIET) $(BIN)/python -m pytest -n 8 --dist loadgroup -m gpu $(PYTEST_ARGS)

bench: $(TEST_STAMP)
	@$(QUIET) $(BIN)/python -m benchmarks $(BENCH_ARGS)

lint: $(TEST_STAMP)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

format: $(TEST_STAMP)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build out .pytest_cache .mypy_cache .ruff_cache
