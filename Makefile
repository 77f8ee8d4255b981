# Every target sets up what it needs. `make help` lists them.

VENV ?= .venv
PY := $(VENV)/bin/python
BIN := $(VENV)/bin
# One thread per process: tests, demo and benchmarks run several ranks side by side.
export OMP_NUM_THREADS ?= 1
export VENV

.DEFAULT_GOAL := help
.PHONY: help venv lint types imports format test test-all test-servers test-oldest test-frameworks test-frameworks-short test-frameworks-servers soak demo demo-short bench bench-short bench-storage bench-storage-short bench-frameworks docs lock clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */\1\t/' | awk -F'\t' '{printf "  %-21s %s\n", $$1, $$2}'

venv: ## make or update the environment ($VENV, default .venv)
	@./scripts/bootstrap.sh

lint: venv
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: venv
	$(PY) -m mypy

imports: venv
	$(BIN)/lint-imports

format: venv ## sort imports, fix what can be fixed, format
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

test: venv lint types imports ## ruff, mypy, import-linter, and the tests but slow and soak
	$(PY) -m pytest

test-all: venv lint types imports ## the same, with the slow tests
	$(PY) -m pytest -m "not soak and not server"

test-servers: venv ## the storages against real servers, which are installed first (SERVERS_DIR); a missing one is a failure
	./scripts/install-servers.sh
	BYTECHECKPOINT_REQUIRE_SERVERS=1 $(PY) -m pytest -m server

# What a change of Python can break; the many parallel layouts are tested on one Python only.
test-oldest: ## a part of the tests on Python 3.11, the oldest that is supported (environment: .venv-oldest)
	VENV=.venv-oldest PYTHON=3.11 EXTRAS=cli,dev ./scripts/bootstrap.sh
	.venv-oldest/bin/python -m pytest tests/representation tests/planning tests/opening tests/interop tests/cli \
		tests/roundtrip tests/saving tests/golden

# Real training frameworks, at the versions of constraints-frameworks.txt, in processes over gloo. DeepSpeed compiles helpers,
# once; a lock that a killed compilation has left behind would be waited for without end.
FRAMEWORKS := $(CURDIR)/.venv-frameworks
EXTENSIONS := $(FRAMEWORKS)/torch_extensions
WITH_FRAMEWORKS := PATH="$(FRAMEWORKS)/bin:$$PATH" TORCH_EXTENSIONS_DIR=$(EXTENSIONS) DS_ACCELERATOR=cpu \
	BYTECHECKPOINT_REQUIRE_FRAMEWORKS=1 $(FRAMEWORKS)/bin/python
define frameworks # $(1): the helpers of DeepSpeed that are wanted
	VENV=.venv-frameworks PYTHON=3.12 EXTRAS=cli,dev PINNED=constraints-frameworks.txt ./scripts/bootstrap.sh
	find $(EXTENSIONS) -name lock -delete 2>/dev/null || true
	$(WITH_FRAMEWORKS) -c "from deepspeed.ops.op_builder import cpu; [getattr(cpu, b)().load(verbose=False) for b in '$(1)'.split()]"
endef

test-frameworks: ## DeepSpeed and Megatron-Core, real installs, and the interchange matrix (environment: .venv-frameworks)
	$(call frameworks,ShareMemCommBuilder FusedAdamBuilder CPUAdamBuilder)
	$(WITH_FRAMEWORKS) -m pytest tests/frameworks/deepspeed tests/frameworks/megatron tests/frameworks/interchange

SHORT_OPTIONS ?=
test-frameworks-short: ## the part of the interchange matrix that CI runs: every framework saves and loads (.venv-frameworks)
	$(call frameworks,ShareMemCommBuilder)
	$(WITH_FRAMEWORKS) -m pytest tests/frameworks/interchange -m short $(SHORT_OPTIONS)

test-frameworks-servers: ## real frameworks on a real HDFS and S3, the paper's Figure 6 with Megatron-Core among it (.venv-frameworks)
	./scripts/install-servers.sh versitygw hadoop
	$(call frameworks,ShareMemCommBuilder)
	BYTECHECKPOINT_REQUIRE_SERVERS=1 $(WITH_FRAMEWORKS) -m pytest -m server tests/storage/test_frameworks.py \
		tests/storage/test_hdfs.py -k "framework or figure_6"

soak: venv ## the long runs that look for growth; SOAK_SHORT=1 for a few minutes of them
	$(PY) -m pytest -m soak --timeout=0 -o faulthandler_timeout=0

demo: venv ## train, kill, resume at other layouts, compare the losses
	$(PY) demo/run.py

demo-short: venv ## the same with a smaller model, in under two minutes
	$(PY) demo/run.py --short

bench: venv ## all measurements: table, JSON, chart
	$(PY) -m benchmarks

bench-storage: venv ## the storages beside their own clients, on servers of this machine
	./scripts/install-servers.sh versitygw azurite hadoop
	$(PY) -m benchmarks.storage

bench-storage-short: venv ## the same with small files and few threads
	./scripts/install-servers.sh versitygw azurite hadoop
	$(PY) -m benchmarks.storage --short --threads 4 --places hdfs s3 s3-limited az fsspec local mem

bench-frameworks: ## saving Megatron-Core's distributed optimizer, beside its own formats (.venv-frameworks)
	VENV=.venv-frameworks PYTHON=3.12 EXTRAS=cli,dev,bench PINNED=constraints-frameworks.txt ./scripts/bootstrap.sh
	$(WITH_FRAMEWORKS) -m benchmarks --only megatron

bench-short: venv ## the same on small states
	$(PY) -m benchmarks --short

docs: venv ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet

lock: ## renew constraints.txt from pyproject.toml, keeping the pins that still fit
	$${UV:-uv} pip compile --quiet --universal --python-version 3.11 --all-extras --group bootstrap \
		--no-annotate --no-header --no-emit-index-url --output-file constraints.txt pyproject.toml
	sed -i -E "/'3\.1[12]/!s/ ;.*//" constraints.txt # resolved for Linux only: the common marker says nothing
	sed -i "1i # Every version that the environment is made of, for Python 3.11 and newer on Linux. Renew with \`make lock\`." constraints.txt

clean: ## remove what was built (the environment stays)
	rm -rf build dist site demo-output benchmarks/out .pytest_cache .mypy_cache .ruff_cache .hypothesis \
		.import_linter_cache .grimp_cache .coverage
	find src tests demo benchmarks scripts -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
