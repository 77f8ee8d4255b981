# Every target sets up what it needs. `make help` lists them.

VENV ?= .venv
PY := $(VENV)/bin/python
BIN := $(VENV)/bin
# One thread per process: tests, demo and benchmarks run several ranks side by side.
export OMP_NUM_THREADS ?= 1
# Every target starts many processes, and compiling torch's sources in each of them would take longer than the work.
unexport PYTHONDONTWRITEBYTECODE
export VENV

# Parallel workers of the tests: two for each core, because many tests wait. WORKERS=0 runs them in one process.
WORKERS ?= $(shell cores=$$(env -u OMP_NUM_THREADS nproc); echo $$((cores < 4 ? 2 * cores : 8)))
PYTEST := $(PY) -m pytest -n $(WORKERS)
# COVERAGE=1 measures which lines of the package a test target runs, also in its ranks and helper processes.
ifdef COVERAGE
PYTEST := $(PY) -m coverage run -m pytest -n $(WORKERS)
define coverage
	$(PY) -m coverage combine --quiet
	$(PY) -m coverage report
endef
endif
# Extras and dependency groups of the environments in which the package's own tests run.
TESTED := cli,s3-profiles,fsspec,hdfs,prometheus,otlp,monitor,dev
SEED := 1

.DEFAULT_GOAL := help
.PHONY: help venv lint types imports static format check test test-all test-shuffled servers test-servers test-servers-all test-oldest test-mosaic test-obstore-versions test-frameworks test-frameworks-short test-deepspeed-versions test-megatron-versions test-frameworks-servers test-integrations test-torchtitan test-verl test-vllm test-sglang test-ray test-metrics-sinks test-extras test-integrations-all test-elastic soak demo demo-short demo-trainer bench bench-guard bench-short bench-storage bench-storage-short bench-frameworks docs lock vendor clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */\1\t/' | awk -F'\t' '{printf "  %-21s %s\n", $$1, $$2}'

venv: ## make or update the environment ($VENV, default .venv)
	@./scripts/bootstrap.sh

lint: venv
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(BIN)/codespell src docs benchmarks demo scripts *.md
	$(PY) scripts/style.py

types: venv
	$(PY) -m mypy

imports: venv
	$(BIN)/lint-imports

# At the same time: mypy takes one core for a minute in a fresh clone.
static: venv
	@$(MAKE) --no-print-directory -j3 --output-sync lint types imports

format: venv ## sort imports, fix what can be fixed, format
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# The packages whose tests start no processes, or few.
QUICK := representation layouts planning engine saving opening golden tools roundtrip cli docs demo frameworks \
	collectives/test_agreement.py collectives/test_threads.py storage/test_registry.py storage/test_ranged.py \
	storage/test_wrappers.py
check: venv static ## the inner loop: linters, types, and the tests of the quick packages, in under two minutes
	$(PYTEST) $(QUICK:%=tests/%) --ignore=tests/frameworks/test_world.py

test: venv static ## linters, types, and all tests but slow, soak and server: about ten minutes on two cores
	$(if $(COVERAGE),$(PY) -m coverage erase)
	$(PYTEST)
	$(call coverage)

test-all: venv static ## the same, with the slow tests (tests/README.md lists them)
	HYPOTHESIS_PROFILE=$${HYPOTHESIS_PROFILE:-full} $(PYTEST) -m "not soak and not server"

test-shuffled: venv ## the tests of `make test` in an order of chance; another one with SEED=
	SHUFFLE_SEED=$(SEED) $(PYTEST) -p tests.support.shuffled

servers: ## install the servers that test-servers needs (SERVERS_DIR)
	./scripts/install-servers.sh

# The files that have such tests: of the others each worker would import and leave out ten thousand tests.
SERVER_TESTS = $(shell grep -rl "mark\.server" tests --include="test_*.py")
test-servers: venv servers ## the storages against real servers, without the slow tests; a missing server is a failure
	BYTECHECKPOINT_REQUIRE_SERVERS=1 $(PYTEST) -m "server and not slow" $(SERVER_TESTS)

test-servers-all: venv servers ## the same, with the slow tests, MinIO, and a collector of OpenTelemetry
	./scripts/install-servers.sh minio otelcol
	BYTECHECKPOINT_REQUIRE_SERVERS=1 $(PYTEST) -m server $(SERVER_TESTS)

# What a change of Python can break; the many parallel layouts are tested on one Python only.
test-oldest: ## the quick packages on Python 3.11, the oldest that is supported (environment: .venv-oldest)
	VENV=.venv-oldest PYTHON=3.11 EXTRAS=$(TESTED) ./scripts/bootstrap.sh
	.venv-oldest/bin/python -m pytest -n $(WORKERS) tests/representation tests/layouts tests/planning tests/opening tests/tools tests/cli \
		tests/roundtrip tests/saving tests/golden

# MosaicML Streaming wants an older numpy than the other tools.
test-mosaic: ## real MosaicML Streaming through checkpoints (environment: .venv-mosaic, which the benchmarks use too)
	VENV=.venv-mosaic PYTHON=3.12 EXTRAS=cli,bench PINNED=constraints-mosaic.txt ./scripts/bootstrap.sh
	BYTECHECKPOINT_REQUIRE_MOSAIC=1 .venv-mosaic/bin/python -m pytest tests/dataloader/test_mosaic.py \
		tests/benchmarks/test_mosaic_peer.py

# Older versions of obstore lie beside the pinned one, in folders that come first on the path.
test-obstore-versions: venv ## the errors of every version of obstore that pyproject.toml allows
	set -e; for version in 0.11.0 0.12.1; do \
		folder=$(CURDIR)/.cache/obstore/$$version; \
		$(UV) pip install --quiet --python $(PY) --no-deps --target "$$folder" "obstore==$$version"; \
		PYTHONPATH=$$folder $(PY) -m pytest tests/storage/test_object_client.py; \
	done

# Real training frameworks, at the versions of constraints-frameworks.txt, in processes over gloo. DeepSpeed compiles C++
# extensions once, and would wait forever for the lock of a compilation that was killed.
FRAMEWORKS := $(CURDIR)/.venv-frameworks
EXTENSIONS := $(FRAMEWORKS)/torch_extensions
WITH_FRAMEWORKS := PATH="$(FRAMEWORKS)/bin:$$PATH" TORCH_EXTENSIONS_DIR=$(EXTENSIONS) DS_ACCELERATOR=cpu \
	BYTECHECKPOINT_REQUIRE_FRAMEWORKS=1 $(FRAMEWORKS)/bin/python
# Of Megatron-Bridge the tests take functions out of its source; to run it would need packages for GPUs.
define frameworks # $(1): the extensions of DeepSpeed to compile
	VENV=.venv-frameworks PYTHON=3.12 EXTRAS=$(TESTED) PINNED=constraints-frameworks.txt ./scripts/bootstrap.sh
	$(UV) pip install --quiet --python $(FRAMEWORKS)/bin/python --no-deps --target $(FRAMEWORKS)/megatron-bridge megatron-bridge==0.6.2
	find $(EXTENSIONS) -name lock -delete 2>/dev/null || true
	$(WITH_FRAMEWORKS) -c "from deepspeed.ops.op_builder import cpu; [getattr(cpu, b)().load(verbose=False) for b in '$(1)'.split()]"
endef

test-frameworks: ## real DeepSpeed and Megatron-Core, and the interchange matrix (environment: .venv-frameworks)
	$(call frameworks,ShareMemCommBuilder FusedAdamBuilder CPUAdamBuilder)
	$(WITH_FRAMEWORKS) -m pytest tests/frameworks/deepspeed tests/frameworks/megatron tests/frameworks/interchange

test-frameworks-short: ## changes behind saves, and the part of the interchange matrix in which every framework saves and loads once (.venv-frameworks)
	$(call frameworks,ShareMemCommBuilder)
	$(WITH_FRAMEWORKS) -m pytest tests/frameworks/deepspeed tests/frameworks/megatron tests/frameworks/interchange -m short

# Versions supported beside the pinned one (none so far): each is put into a folder that goes before the environment's own packages.
DEEPSPEED_VERSIONS :=
UV ?= $(shell command -v uv || echo .cache/bootstrap/bin/uv)
test-deepspeed-versions: ## engines and AutoTP with every other version of DeepSpeed that is supported (.venv-frameworks)
	$(call frameworks,ShareMemCommBuilder)
	for version in $(DEEPSPEED_VERSIONS); do \
		folder=$(CURDIR)/.cache/deepspeed/$$version; \
		$(UV) pip install --quiet --python $(FRAMEWORKS)/bin/python --target $$folder --no-deps \
			--build-constraint constraints.txt deepspeed==$$version || exit 1; \
		export PYTHONPATH=$$folder BYTECHECKPOINT_DEEPSPEED=$$version; \
		$(subst $(EXTENSIONS),$$folder/torch_extensions,$(WITH_FRAMEWORKS)) \
			-c "from deepspeed.ops.op_builder import cpu; cpu.ShareMemCommBuilder().load(verbose=False)" || exit 1; \
		$(subst $(EXTENSIONS),$$folder/torch_extensions,$(WITH_FRAMEWORKS)) -m pytest \
			tests/frameworks/deepspeed/test_tensor_parallel.py \
			tests/frameworks/deepspeed/test_states.py -k "version or every_way or every_layout" || exit 1; \
	done

# Older versions of Megatron-Core lie beside the newest, in folders that come first on the path.
test-megatron-versions: ## Megatron-Core 0.16, 0.17 and 0.18: element by element through every layout (.venv-frameworks)
	$(call frameworks,)
	set -e; for version in 0.16.1 0.17.1 0.18.0; do \
		folder=$(FRAMEWORKS)/megatron-$$version; \
		$(UV) pip install --quiet --python $(FRAMEWORKS)/bin/python --no-deps --target "$$folder" "megatron-core==$$version"; \
		PYTHONPATH=$$folder $(WITH_FRAMEWORKS) -c "import megatron.core as m; assert m.__version__ == '$$version', m"; \
		PYTHONPATH=$$folder $(WITH_FRAMEWORKS) -m pytest tests/frameworks/megatron/test_layouts.py \
			tests/frameworks/megatron/test_structure.py tests/frameworks/megatron/test_edges.py -k "coordinates or structures or alone"; \
	done

test-frameworks-servers: ## real frameworks on real HDFS and S3, with the example of the paper's Figure 6 (.venv-frameworks)
	./scripts/install-servers.sh versitygw hadoop
	$(call frameworks,ShareMemCommBuilder)
	BYTECHECKPOINT_REQUIRE_SERVERS=1 $(WITH_FRAMEWORKS) -m pytest -m server tests/storage/test_frameworks.py \
		tests/storage/test_hdfs.py -k "framework or figure_6"

# Real training tools of other people, which decide when to save. DCP is a part of torch: `make test` runs its tests.
test-integrations: ## real Hugging Face Accelerate, Trainer, TRL, PEFT and Lightning (environment: .venv-integrations)
	VENV=.venv-integrations PYTHON=3.12 EXTRAS=$(TESTED),accelerate,transformers,lightning PINNED=constraints-integrations.txt \
		./scripts/bootstrap.sh
	BYTECHECKPOINT_REQUIRE_INTEGRATIONS=1 .venv-integrations/bin/python -m pytest -n $(WORKERS) tests/integrations \
		$(patsubst %,--ignore=tests/integrations/%,torchtitan ray vllm sglang verl veomni dcp) $(WITH_SLOW)

# torchtitan wants older datasets and huggingface-hub than the other tools.
test-torchtitan: ## real torchtitan on the CPU (environment: .venv-torchtitan)
	VENV=.venv-torchtitan PYTHON=3.12 EXTRAS=cli,torchtitan PINNED=constraints-torchtitan.txt ./scripts/bootstrap.sh
	BYTECHECKPOINT_REQUIRE_INTEGRATIONS=1 .venv-torchtitan/bin/python -m pytest tests/integrations/torchtitan $(WITH_SLOW)

# Starting Ray and its workers takes longer than all tests of the other tools.
test-ray: ## a real Ray Train of this machine (environment: .venv-ray)
	VENV=.venv-ray PYTHON=3.12 EXTRAS=cli,ray PINNED=constraints-ray.txt ./scripts/bootstrap.sh
	BYTECHECKPOINT_REQUIRE_INTEGRATIONS=1 .venv-ray/bin/python -m pytest tests/integrations/ray $(WITH_SLOW)

# vLLM's wheel for CPUs wants a build of torch that PyPI lacks; the ordinary one serves.
test-vllm: ## real vLLM on the CPU (environment: .venv-vllm)
	VENV=.venv-vllm PYTHON=3.12 EXTRAS=cli,dev ./scripts/bootstrap.sh
	UV_PYTHON_DOWNLOADS=never $(UV) pip install -q --python .venv-vllm/bin/python -r constraints-vllm.txt \
		--override constraints-vllm-torch.txt
	BYTECHECKPOINT_REQUIRE_INTEGRATIONS=1 .venv-vllm/bin/python -m pytest tests/integrations/vllm $(WITH_SLOW)

# SGLang asks for kernels of CUDA and a newer torch; on a CPU it runs without them, in vLLM's environment.
test-sglang: ## real SGLang on the CPU (environment: .venv-vllm)
	VENV=.venv-vllm PYTHON=3.12 EXTRAS=cli,dev ./scripts/bootstrap.sh
	UV_PYTHON_DOWNLOADS=never $(UV) pip install -q --python .venv-vllm/bin/python -r constraints-vllm.txt \
		--override constraints-vllm-torch.txt
	UV_PYTHON_DOWNLOADS=never $(UV) pip install -q --python .venv-vllm/bin/python --no-deps -r constraints-sglang.txt
	BYTECHECKPOINT_REQUIRE_INTEGRATIONS=1 .venv-vllm/bin/python -m pytest tests/integrations/sglang $(WITH_SLOW)

# verl's wheel has a package `tests`, which would hide the tests here.
test-verl: ## real verl and VeOmni on the CPU (environment: .venv-verl)
	VENV=.venv-verl PYTHON=3.12 EXTRAS=cli,dev ./scripts/bootstrap.sh
	UV_PYTHON_DOWNLOADS=never $(UV) pip install -q --python .venv-verl/bin/python -r constraints-verl.txt \
		--override constraints-vllm-torch.txt
	rm -rf .venv-verl/lib/python3.12/site-packages/tests
	BYTECHECKPOINT_REQUIRE_INTEGRATIONS=1 .venv-verl/bin/python -m pytest tests/integrations/verl tests/integrations/veomni

# W&B, MLflow and ClickHouse's engine are large, and nothing else needs them.
test-metrics-sinks: ## metrics in real TensorBoard, W&B, MLflow and today's ClickHouse (environment: .venv-metrics)
	VENV=.venv-metrics PYTHON=3.12 EXTRAS=$(TESTED),tensorboard,wandb,mlflow PINNED=constraints-metrics.txt ./scripts/bootstrap.sh
	BYTECHECKPOINT_REQUIRE_METRICS=1 .venv-metrics/bin/python -m pytest tests/monitoring/test_sinks_tools.py

# After the others, whose packages are in the cache then.
test-extras: venv ## each published extra alone in a clean environment
	./scripts/install-servers.sh versitygw
	BYTECHECKPOINT_REQUIRE_SERVERS=1 $(PYTEST) -m slow tests/packaging/test_extras.py

test-integrations-all: ## the tests of all training tools (the three targets above), with the slow ones
	$(MAKE) test-integrations test-torchtitan test-ray WITH_SLOW='-m "not soak and not server"'

# Most of the time torch is imported, or torchrun's agents wait for each other.
test-elastic: venv ## jobs of torchrun that lose ranks and machines, or run in a container; ELASTIC_SHORT=1 leaves the longest out
	$(PYTEST) -m slow tests/manager/test_elastic.py tests/manager/test_preemption.py tests/faults/test_container.py \
		$(if $(ELASTIC_SHORT),-k 'not silent')

soak: venv ## long runs in which memory, threads and files must not grow; SOAK_SHORT=1 takes a few minutes
	$(PY) -m pytest -m soak --timeout=0 -o faulthandler_timeout=0

demo: venv ## train, kill a rank, resume at other layouts, compare the losses
	$(PY) demo/run.py

demo-trainer: ## fine-tune with Hugging Face Trainer, kill it, go on, compare (environment: .venv-integrations)
	VENV=.venv-integrations PYTHON=3.12 EXTRAS=$(TESTED),accelerate,transformers,lightning PINNED=constraints-integrations.txt \
		./scripts/bootstrap.sh
	.venv-integrations/bin/python demo/kill_trainer.py

demo-short: venv ## the demo with a smaller model, in under two minutes
	$(PY) demo/run.py --short

bench: venv ## run all benchmarks: table, JSON, chart
	$(PY) -m benchmarks

bench-storage: venv ## the storages against their vendors' clients, on servers of this machine
	./scripts/install-servers.sh versitygw azurite hadoop glusterfs
	$(PY) -m benchmarks.storage

bench-storage-short: venv ## bench-storage with small files and few threads
	./scripts/install-servers.sh versitygw azurite hadoop glusterfs
	$(PY) -m benchmarks.storage --short --threads 4 --places hdfs s3 s3-limited az fsspec local nas mem

bench-frameworks: ## saving Megatron-Core's distributed optimizer, against its own formats (.venv-frameworks)
	VENV=.venv-frameworks PYTHON=3.12 EXTRAS=$(TESTED),bench PINNED=constraints-frameworks.txt ./scripts/bootstrap.sh
	$(WITH_FRAMEWORKS) -m benchmarks --only megatron

bench-guard: venv ## core time in ratios to peers, held against benchmarks/guard.json
	$(PY) -m benchmarks.guard

bench-short: venv ## bench on small states, once each, with one and two ranks
	$(PY) -m benchmarks --short --worlds 1 2

docs: venv ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet

# All groups, and all extras but torchtitan, which wants older packages than the others.
LOCKED_EXTRAS := accelerate cli fsspec hdfs lightning mlflow monitor objects orbax otlp prometheus ray s3-profiles tensorboard transformers wandb
LOCKED_GROUPS := bench bootstrap demo dev docs
lock: ## update constraints.txt from pyproject.toml, keeping the pins that still fit
	$(UV) pip compile --quiet --universal --python-version 3.11 $(LOCKED_EXTRAS:%=--extra %) \
		$(LOCKED_GROUPS:%=--group %) --no-annotate --no-header --no-emit-index-url --output-file constraints.txt pyproject.toml
	sed -i -E "/'3\.1[12]/!s/ ;.*//" constraints.txt # resolved for Linux only: the common marker says nothing
	sed -i "1i # Every version that the environment is made of, for Python 3.11 and newer on Linux. Renew with \`make lock\`." constraints.txt

vendor: ## renew the chart library of the report: ECHARTS=version
	./scripts/vendor-echarts.sh $(or $(ECHARTS),$(error give ECHARTS=version))

clean: ## remove what was built (the environment stays)
	rm -rf build dist site demo-output benchmarks/out .pytest_cache .mypy_cache .ruff_cache .hypothesis \
		.import_linter_cache .grimp_cache .coverage
	find src tests demo benchmarks scripts -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
