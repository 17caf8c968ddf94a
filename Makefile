# make demo, make test: each makes .venv on the first call, and starts at once afterwards.
VENV   ?= .venv
OLDEST ?= .venv-oldest
PYTEST_ARGS ?=

NATIVE := pyproject.toml .ci/setup $(wildcard ffi/CMakeLists.txt ffi/csrc/*)
SOAK   := tests/models/serving/test_storm.py::test_a_soak
TEST   := -m pytest -n auto --maxprocesses 4 --dist worksteal -q $(PYTEST_ARGS)

# Bytecode is written, whatever the shell says: the suite starts some two hundred processes that import jtile.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test soak test-all test-oldest test-gpu ascend-tools test-ascend lint format bench docs dist clean
help:
	@echo "make demo          kernels against jnp, then text from SmolLM2"
	@echo "make test          the test-suite"
	@echo "make soak          a server under clients of all kinds, for a minute"
	@echo "make test-all      the test-suite with its slow tests, and the compilers' optimisations on"
	@echo "make test-oldest   the test-suite with the oldest supported JAX"
	@echo "make test-gpu      the test-suite on an NVIDIA GPU"
	@echo "make test-ascend   what compiles for Ascend NPUs, with the vendor's open compilers from PyPI (230 MB on disk)"
	@echo "make lint          ruff and pyright"
	@echo "make bench         speeds against XLA and llama.cpp on this machine"
	@echo "make docs          the documentation site, in docs/_build/html"
	@echo "make dist          what is published: the wheel for this machine's kind, and the sources, in dist"

demo: $(VENV)/.run
	@$(VENV)/bin/jtile demo

test: $(VENV)/.dev
	@$(VENV)/bin/python $(TEST)

# Little work for the processors: most of the minute passes between two clients. `make test-all` has twenty minutes.
soak: $(VENV)/.dev
	@SOAK_SECONDS=60 SOAK_CLIENTS=250 $(VENV)/bin/python -m pytest -n 0 -q -rP --runslow $(SOAK)

# What continuous integration leaves out to be quick: for every night.
test-all: $(VENV)/.dev
	@XLA_FLAGS="$(XLA_FLAGS) --xla_backend_optimization_level=3" JTILE_OPTIMIZE=1 $(VENV)/bin/python $(TEST) --runslow

test-oldest: $(OLDEST)/.oldest
	@$(OLDEST)/bin/python $(TEST)

test-gpu: $(VENV)/.gpu
	@$(VENV)/bin/python -m pytest -n 8 --dist worksteal -q --gpu $(PYTEST_ARGS)

# The programs that compile for Ascend NPUs, by their hashes; see docs/ascend.md.
ascend-tools: $(VENV)/.dev
	@$(VENV)/bin/python -m jtile.lowering.ascend.install

test-ascend: ascend-tools
	@$(VENV)/bin/python -m pytest -n auto --maxprocesses 4 --dist worksteal -q --runslow \
	  tests/lowering/ascend tests/calls/test_bundle.py tests/ffi/test_ascend.py tests/ops/test_npu_forms.py $(PYTEST_ARGS)

lint: $(VENV)/.lint
	@$(VENV)/bin/python -m ruff check .
	@$(VENV)/bin/python -m ruff format --check .
	@.ci/typecheck $(VENV)

format: $(VENV)/.lint
	@$(VENV)/bin/python -m ruff check --fix -q . ; $(VENV)/bin/python -m ruff format .
	@git ls-files '*.md' | xargs .ci/wrap

bench: $(VENV)/.dev
	@$(VENV)/bin/python -m benchmarks cpu

# Every warning is an error: a link that leads nowhere, a page that no table of contents has, a docstring that does not parse.
docs: $(VENV)/.docs
	@$(VENV)/bin/jupytext --quiet --update --to ipynb --output docs/learn/puzzles.ipynb docs/learn/puzzles.md
	@$(VENV)/bin/python -m sphinx -q -W --keep-going -b html -d docs/_build/doctrees docs docs/_build/html
	@echo "docs/_build/html/index.html"

# The wheel's name says which C library it needs, and so on which systems it installs.
dist: $(VENV)/.dist
	@rm -rf build/dist dist
	@$(VENV)/bin/python -m build -q --outdir build/dist
	@PATH="$(abspath $(VENV))/bin:$$PATH" auditwheel repair -w dist build/dist/*.whl
	@mv build/dist/*.tar.gz dist/
	@ls dist

$(VENV)/.run: $(NATIVE)
	@.ci/setup run $(VENV)
	@touch $@

# On top of an environment that `make demo` made, or makes in the same call; or all at once.
RUN := $(or $(wildcard $(VENV)/.run),$(if $(filter demo,$(MAKECMDGOALS)),$(VENV)/.run))
$(VENV)/.dev: $(NATIVE) $(RUN)
	@.ci/setup $(if $(RUN),dev,all) $(VENV)
	@touch $(VENV)/.run $@

$(VENV)/.lint: $(VENV)/.dev
	@.ci/setup lint $(VENV)
	@touch $@

$(VENV)/.gpu: $(VENV)/.dev
	@.ci/setup gpu $(VENV)
	@touch $@

$(VENV)/.docs: $(VENV)/.dev
	@.ci/setup docs $(VENV)
	@touch $@

$(VENV)/.dist: $(VENV)/.dev
	@.ci/setup dist $(VENV)
	@touch $@

$(OLDEST)/.oldest: $(NATIVE)
	@.ci/setup oldest $(OLDEST)
	@touch $@

clean:
	@rm -rf build dist docs/_build .pytest_cache .ruff_cache
