# Commands for contributors; `make` alone lists them.
# They need make and Python >= 3.10 with venv. Everything else is installed into .venv.

# The first Python that runs, is new enough and can create environments. A version manager may offer a command that then
# refuses to run, so each candidate is executed. 3.11 comes first because the pins are tested mostly on it. A distribution's
# build comes before a version manager's, which runs Python code up to twice as slowly; torch.compile needs its headers.
PYTHON ?= $(shell for python in $(if $(wildcard /usr/include/python3.11/Python.h),/usr/bin/python3.11) python3.11 python3.12 python3.13 python3.10 python3; do \
	if $$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; \
	then echo $$python; break; fi; done)

VENV := .venv
# torch_xla needs the torch of the same release, so its tests have a separate environment.
XLA_VENV := .venv-xla
XLA_TESTS := tests/xla tests/contracts/test_backend.py
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# fastai requires a torchvision build that matches torch. The tests need no torchvision (tests/integration/fastai.txt).
FASTAI := $(VENV)/fastai
FASTAI_STAMP := $(FASTAI)/.complete
# Stamps: make repeats a step only after its recipe changes.
DEMO_STAMP := $(VENV)/.demo
DOCS_STAMP := $(VENV)/.docs
BROWSER_STAMP := $(VENV)/.browser
COLAB_STAMP := .venv-colab-kernel/.complete
XLA_STAMP := $(XLA_VENV)/.complete
XLA_OLDER_VENV := .venv-xla-older
XLA_OLDER_STAMP := $(XLA_OLDER_VENV)/.complete
# libtpu and JAX, only for the TPU compiler: JAX does not need torch, and torch_xla does not need JAX.
TPU_COMPILER_VENV := .venv-tpu-compiler
TPU_COMPILER_STAMP := $(TPU_COMPILER_VENV)/.installed
# torch_tpu changes torch in any environment where it is installed.
TORCH_TPU_VENV := .venv-torch-tpu
TORCH_TPU_STAMP := $(TORCH_TPU_VENV)/.installed
# The packages of a notebook service's image: one file in tests/images. Its Python version must match PYTHON.
PROFILE ?= colab-2026-08
IMAGE_VENV = .venv-image-$(PROFILE)
CONSTRAINTS ?= constraints.txt
# More arguments for pytest: `make test ARGS='tests/dashboard -x'`.
ARGS ?=
# Number of test processes: three more than cores, because tests spend half of their time waiting for processes and
# kernels, and those of tests/nodes nine tenths. All tests of a module run in one process.
WORKERS ?= $(shell echo $$(( $$(getconf _NPROCESSORS_ONLN) + 3 )))
# Set to --thorough to run the tests marked as thorough, too.
THOROUGH ?=

export PIP_DISABLE_PIP_VERSION_CHECK = 1
export PIP_NO_INPUT = 1
# Half of the time of an installation would go into compiling modules that nothing imports.
export PIP_COMPILE = 0
# Tests start hundreds of interpreters. Without cached bytecode, each would compile all its imports again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-main test-thorough browser colab-env test-gpu test-xla test-xla-older test-tpu-compiler test-torch-tpu test-images xla-env lint format stubs golden bench picture docs notebooks wheel clean

help:  ## list these commands
	@sed -n 's/^\([a-z-]*\):.*  ## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST)

setup: $(STAMP) $(FASTAI_STAMP)  ## create .venv and install nblaunch with everything the tests need

$(STAMP): pyproject.toml $(CONSTRAINTS)
	$(call install,'.[test]')

$(FASTAI_STAMP): tests/integration/fastai.txt | $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(FASTAI) --requirement $<
	@touch $@

# Create .venv and install $(1) into it, with uv if available, else with pip. Downloads take minutes, so both show progress.
# uv ignores pip's settings and variables, so the index is passed as an option. If uv fails, pip tries.
# Upgrade pip first: older releases take minutes to resolve versions.
UV := $(shell command -v uv 2>/dev/null)
UV_INDEX = $(if $(PIP_INDEX_URL),--default-index $(PIP_INDEX_URL)) \
	$(if $(PIP_EXTRA_INDEX_URL),--index $(PIP_EXTRA_INDEX_URL) --index-strategy unsafe-best-match)
PIP_INSTALL = $(BIN)/python -m pip install --quiet --upgrade pip && $(BIN)/python -m pip install
define install
@test -n "$(PYTHON)" || { echo "make: no Python >= 3.10 with venv and ensurepip found;" \
	"install one or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; exit 1; }
$(PYTHON) -m venv $(VENV)
@echo "Installing nblaunch and what it needs into $(VENV) ..."
$(if $(PIP_EXTRA_INDEX_URL),,@echo "If torch's CUDA build is chosen, this downloads several gigabytes. To choose the CPU build:" \
	"make $(MAKECMDGOALS) PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu")
$(if $(UV),$(UV) pip install --python $(BIN)/python $(UV_INDEX) --constraint $(CONSTRAINTS) --editable $(1) || \
	{ echo "make: uv failed; trying pip"; )$(PIP_INSTALL) --constraint $(CONSTRAINTS) --editable $(1)$(if $(UV),; })
@touch $@
endef

demo: $(if $(wildcard $(STAMP)),setup,$(DEMO_STAMP))  ## run the quickstart notebook on all cores and print its ranks and accuracy
	@mkdir -p artifacts
	$(BIN)/nblaunch run-notebook notebooks/01_quickstart.ipynb --output artifacts/01_quickstart.ipynb

# The notebook needs only a few of the tests' packages.
$(DEMO_STAMP): pyproject.toml $(CONSTRAINTS)
	$(call install,'.[demo]')

wheel:  ## build dist/nblaunch-*.whl, to install elsewhere
	@test -n "$(PYTHON)" || { echo "make: no Python >= 3.10 with venv and ensurepip found" >&2; exit 1; }
	@test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	@ls dist/*.whl

docs: $(if $(wildcard $(STAMP)),setup,$(DOCS_STAMP))  ## build the documentation; a warning is an error
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -c docs . docs/_build/html
	@echo "open docs/_build/html/index.html"

notebooks: setup xla-env  ## execute the notebooks and store their outputs; select some with ARGS='01_quickstart 03_tpu'
	$(BIN)/python -m tests.tools.notebooks $(ARGS)

$(DOCS_STAMP): pyproject.toml $(CONSTRAINTS)
	$(call install,'.[docs]')

ifeq ($(strip $(ARGS)),)
# Run every part, even after a failure. The last lines list the parts that failed. The XLA tests have an environment of
# their own. Two processes run them beside everything else, so that cores work while other tests wait.
test:  ## lint, then run all tests, including XLA; the last lines list failed parts. With ARGS: run only the tests they select
	@mkdir -p artifacts; make="$(MAKE) --no-print-directory"; failed=; \
	$$make test-xla WORKERS=2 > artifacts/test-xla.log 2>&1 & xla=$$!; trap "kill $$xla; exit 1" INT TERM; \
	$$make --keep-going setup browser colab-env; \
	echo; echo "== lint =="; $$make lint || failed=" lint"; \
	echo; echo "== test-main =="; $$make test-main || failed="$$failed test-main"; \
	wait $$xla || failed="$$failed test-xla"; \
	echo; echo "== test-xla =="; cat artifacts/test-xla.log; \
	if [ -n "$$failed" ]; then echo "make test: failed:$$failed"; exit 1; fi; \
	echo "make test: lint, test-xla and test-main passed"
else
test: setup browser colab-env
	$(BIN)/python -m pytest $(THOROUGH) $(ARGS)
endif

# Run a whole suite. $(1): interpreter, $(2): test paths, $(3): options.
define whole_suite
	@$(1) -m pytest $(2) $(3) --numprocesses $(WORKERS) --maxprocesses 5 --no-loadscope-reorder
endef

test-main: setup browser colab-env  ## run all tests except XLA
	$(call whole_suite,$(BIN)/python,,$(THOROUGH))

test-thorough:  ## run `make test` with the thorough tests, which vary what faster ones check: start methods, strategies, front ends
	@$(MAKE) --no-print-directory test THOROUGH=--thorough

# Without a browser, the browser tests fail in CI with the reason; elsewhere they are skipped.
browser: $(BROWSER_STAMP)  ## find Chromium for the browser tests; install Debian's where that needs no password

$(BROWSER_STAMP): tests/tools/browser.py | $(STAMP)
	@$(BIN)/python $< && touch $@ || true

colab-env: $(COLAB_STAMP)  ## create an environment with Colab's kernel and matching front ends (270 MB)

$(COLAB_STAMP): tests/tools/colab_env.py constraints-colab.txt $(STAMP)
	$(BIN)/python $< $(@D)
	@touch $@

test-gpu:  ## run all GPU tests and benchmarks on NVIDIA GPUs (about 20 minutes); figures go to artifacts/gpu.md
	$(PYTHON) -m tests.hardware.report $(ARGS)

ifeq ($(strip $(ARGS)),)
test-xla: xla-env  ## run the XLA tests with the real torch_xla on the CPU, in a separate environment
	$(call whole_suite,PJRT_DEVICE=CPU $(XLA_VENV)/bin/python,$(XLA_TESTS),$(THOROUGH) --override-ini cache_dir=.pytest_cache/xla)
else
test-xla: xla-env
	PJRT_DEVICE=CPU $(XLA_VENV)/bin/python -m pytest $(XLA_TESTS) $(THOROUGH) $(ARGS)
endif

# Releases differ in how they find a host's chips and assign them to workers, so test the previous one, too.
test-xla-older: $(XLA_OLDER_STAMP)  ## check the table of TPU hosts with torch_xla 2.8 (2.6 GB more); not part of `make test`
	PJRT_DEVICE=CPU $(XLA_OLDER_VENV)/bin/python -m pytest tests/xla/test_hosts.py tests/xla/test_topology.py tests/xla/test_sharded_weights.py $(ARGS)

$(XLA_OLDER_STAMP): tests/tools/xla_env.py $(CONSTRAINTS)
	@test -n "$(PYTHON)" || { echo "make: no Python >= 3.10 with venv and ensurepip found" >&2; exit 1; }
	$(PYTHON) -c "import pathlib, sys; sys.path.insert(0, 'tests/tools'); import xla_env; \
		xla_env.TORCH = ('torch==2.8.0', 'torch_xla==2.8.0'); sys.exit(xla_env.main(pathlib.Path('$(@D)')))"
	@touch $@

test-tpu-compiler: xla-env $(TPU_COMPILER_STAMP)  ## compile training steps with the real TPU compiler, without a TPU (600 MB more); not part of `make test`
	PJRT_DEVICE=CPU TPU_COMPILER=$(abspath $(TPU_COMPILER_VENV))/bin/python $(XLA_VENV)/bin/python -m pytest tests/tpu_compiler $(ARGS)

$(TPU_COMPILER_STAMP): tests/tpu_compiler/requirements.txt
	@test -n "$(PYTHON)" || { echo "make: no Python >= 3.10 with venv and ensurepip found" >&2; exit 1; }
	$(PYTHON) -m venv $(TPU_COMPILER_VENV)
	$(TPU_COMPILER_VENV)/bin/python -m pip install --quiet --requirement $<
	@touch $@

test-torch-tpu: $(TORCH_TPU_STAMP)  ## start workers with the real torch_tpu and libtpu, without a TPU (1 to 2 minutes; 2.1 GB); not part of `make test`
	$(TORCH_TPU_VENV)/bin/python -m pytest tests/torch_tpu $(ARGS)

$(TORCH_TPU_STAMP): tests/torch_tpu/requirements.txt pyproject.toml $(CONSTRAINTS)
	@test -n "$(PYTHON)" || { echo "make: no Python >= 3.10 with venv and ensurepip found" >&2; exit 1; }
	$(PYTHON) -m venv $(TORCH_TPU_VENV)
	$(TORCH_TPU_VENV)/bin/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable . --requirement $<
	@touch $@

test-images:  ## run all notebooks and one launch of each kind with Colab's or Kaggle's packages, and in marimo (PROFILE=colab-2026-08, see tests/images; 3 GB); not part of `make test`
	@test -n "$(PYTHON)" || { echo "make: no Python >= 3.10 with venv and ensurepip found" >&2; exit 1; }
	$(PYTHON) tests/tools/image_env.py $(PROFILE) $(IMAGE_VENV)
	IMAGE=$(PROFILE) $(IMAGE_VENV)/bin/python -m pytest tests/images -W ignore::DeprecationWarning $(ARGS)

xla-env: $(XLA_STAMP)  ## create the environment for the XLA tests (2.6 GB)

$(XLA_STAMP): tests/tools/xla_env.py $(CONSTRAINTS)
	@test -n "$(PYTHON)" || { echo "make: no Python >= 3.10 with venv and ensurepip found" >&2; exit 1; }
	$(PYTHON) $< $(@D)
	@touch $@

# Reject syntax and library functions newer than `requires-python`. Mark a line that checks for the feature at run time
# with "# novm". Mypy checks only the package.
VERMIN := vermin --quiet --violations --no-tips --target=3.10- nblaunch tests

lint: setup  ## check format, style, types and import layers without changing files; report all findings
	@status=0; for check in 'ruff format --check .' 'ruff check .' mypy '$(VERMIN)' lint-imports; do \
		echo "$$check"; $(BIN)/$$check || status=1; done; exit $$status

format: setup  ## rewrite the code in the house style
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix-only .

stubs: setup  ## regenerate the type stubs of nblaunch and Accelerate's module names from nblaunch/compat.py
	$(BIN)/python -m tests.tools.stubs

golden: setup  ## regenerate the golden files: the exact text of failures, tables and the terminal
	$(BIN)/python -m pytest --update-golden --quiet tests/failures/test_shown.py tests/dashboard/test_render.py
	git diff --stat -- tests/golden

bench: setup  ## run the benchmarks and print their figures; select some with ARGS='launch_cost memory'
	$(BIN)/python -m tests.benchmarks $(ARGS)

picture: setup browser  ## take the README's pictures of the dashboard again in JupyterLab: a still and an animation
	$(BIN)/python -m tests.tools.picture

clean:  ## remove environments, builds and caches
	rm -rf $(VENV) $(XLA_VENV) $(XLA_OLDER_VENV) $(TPU_COMPILER_VENV) $(TORCH_TPU_VENV) .venv-image-* .venv-colab-kernel build dist *.egg-info artifacts .mypy_cache .ruff_cache .pytest_cache .import_linter_cache docs/_build .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
