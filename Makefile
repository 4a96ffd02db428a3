# make demo   the main job on the embedded demo pair; make demo PROMPT="..." asks something else
# make test   the tests, in minutes; make test ARGS="-k demo" runs a part
# make test-all   every combination and the long runs as well, and the server's page in a Chromium;
#                 ARGS=--without-browser where there is none
# make lint   ruff, its format, and mypy
# make bench  the README's table on the demo pair, in half an hour; ARGS="..." measures something else
# make demo-head  the demo head taken further, as it was made: the demo target answers 16416 questions, and
#                 the head learns from them, for hours on a CPU; QUESTIONS=100 ARGS="--iters 20" is quick
# make docs   the documentation site, into docs/site
# make clean  remove what these made
#
# Needs Python 3.11 or newer (PYTHON=python3.12 picks one) and a network for the first run.
# On Linux BACKEND=cuda12 or cuda13 takes MLX's build for CUDA instead of that for CPUs; in a place
# where another one is installed, run make clean before.

PYTHON ?= python3
PROMPT =
ARGS =
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Off, whoever has it on: the tests start Python by the dozen, and each would compile the package anew.
export PYTHONDONTWRITEBYTECODE =
# Which build of MLX Linux gets: an extra of pyproject.toml. A Mac has only one, whatever this says.
BACKEND = cpu
# Through the environment, so that quotes and dollars in a prompt reach the program as they are.
export DEMO_PROMPT = $(value PROMPT)

BENCH := --limit 4 --repeats 2 --num-draft-tokens 1,2,3,auto --with-lookup auto \
	--tree 2x2:3,auto --order weave

# Files are spread over the cores, one BLAS thread each, by name: xdist's own order leaves those with
# few but slow tests for the end, where one core waits for the other.
# Without TF32, which MLX uses for float32 on M5 and CUDA: 10 bits are not what the tests compare.
PYTEST := env OPENBLAS_NUM_THREADS=1 MLX_ENABLE_TF32=0 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile \
	--no-loadscope-reorder

DEMO_HEAD := build/demo-head
QUESTIONS = 16416
DEMO_TARGET := from mlx_eagle.demo.pair import demo_target_path as path; print(path())

.PHONY: demo demo-head test test-all lint bench docs clean

demo: $(VENV)/installed
	@$(BIN)/python -m mlx_eagle.demo $(if $(PROMPT),--prompt "$$DEMO_PROMPT") $(ARGS)

test: $(VENV)/installed-test
	@$(PYTEST) -m "not exhaustive" $(ARGS)

test-all: $(VENV)/installed-$(if $(findstring --without-browser,$(ARGS)),test,browser)
	@$(PYTEST) $(ARGS)

lint: $(VENV)/installed-lint
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

bench: $(VENV)/installed-bench
	@$(BIN)/python -m mlx_eagle.bench $(or $(ARGS),$(BENCH))

# Stopped with Ctrl-C and made again, it goes on. Flags in ARGS come last, and so count.
demo-head: $(VENV)/installed
	@mkdir -p $(DEMO_HEAD)/questions
	@gzip -dc tests/data/demo-questions.jsonl.gz | head -n $(QUESTIONS) > $(DEMO_HEAD)/questions/train.jsonl
	$(BIN)/python -m mlx_eagle.train --model "$$($(BIN)/python -c '$(DEMO_TARGET)')" \
		--data $(DEMO_HEAD)/questions --regenerate --answer-temps 0 --answer-tokens 176 \
		--init tests/data/eagle3-smollm2-135m-instruct --output $(DEMO_HEAD)/head \
		--iters 2040 --batch-size 8 --learning-rate 3e-4 --warmup 0.04 --ttt-steps 3 --max-seq-length 384 \
		$(if $(wildcard $(DEMO_HEAD)/head/checkpoints/0*),--resume) $(ARGS)

docs: $(VENV)/installed-docs
	@$(BIN)/python -m mkdocs build --strict --config-file docs/mkdocs.yml $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache docs/site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "make: $(PYTHON) is missing or older than Python 3.11: install one, or name it with make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import platform, sys; sys.exit((platform.system(), platform.machine()) == ("Darwin", "x86_64"))' || { \
		echo "make: $(PYTHON) is built for Intel, and MLX needs a Mac with Apple silicon: install a native (arm64) Python, or name it with make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import platform, sys; sys.exit(platform.system() == "Darwin" and int(platform.mac_ver()[0].split(".")[0]) < 14)' || { \
		echo "make: this macOS is older than 14, the oldest that MLX is built for: update it." >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
		echo "make: $(PYTHON) cannot make virtual environments: install its venv module." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/installed: $(VENV)/created pyproject.toml
	@echo "Installing into $(VENV), once." >&2
	@$(BIN)/python -m pip install --quiet --editable '.[$(BACKEND)]'
	@touch $@

$(VENV)/installed-bench: $(VENV)/created pyproject.toml
	@echo "Installing into $(VENV) with what plots need, once." >&2
	@$(BIN)/python -m pip install --quiet --editable '.[$(BACKEND),bench]'
	@touch $(VENV)/installed $@

$(VENV)/installed-test: $(VENV)/created pyproject.toml
	@echo "Installing into $(VENV) with what the tests need, once." >&2
	@$(BIN)/python -m pip install --quiet --editable '.[$(BACKEND),test]'
	@touch $(VENV)/installed $@

$(VENV)/installed-browser: $(VENV)/created pyproject.toml
	@echo "Installing into $(VENV) with what the tests and a browser need, once." >&2
	@$(BIN)/python -m pip install --quiet --editable '.[$(BACKEND),test,browser]'
	@touch $(VENV)/installed $(VENV)/installed-test $@

$(VENV)/installed-lint: $(VENV)/created pyproject.toml
	@echo "Installing into $(VENV) what checks the code, once." >&2
	@$(BIN)/python -m pip install --quiet --editable '.[$(BACKEND),lint]'
	@touch $@

$(VENV)/installed-docs: $(VENV)/created pyproject.toml
	@echo "Installing into $(VENV) what the documentation needs, once." >&2
	@$(BIN)/python -m pip install --quiet --editable '.[$(BACKEND),docs]'
	@touch $(VENV)/installed $@
