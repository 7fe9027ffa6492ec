# Two commands matter: `make demo` does the main job, `make test` runs the tests.
# Each sets up what it needs in .venv first.
.DEFAULT_GOAL := demo
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CORE := $(VENV)/.core-installed
DEV := $(VENV)/.dev-installed

test-long: $(DEV)
	@# Where the packages cannot be had, their tests are skipped and say so.
	-@$(MAKE) --no-print-directory zoo
	@# Federations of real processes use fixed ports: one after another, beside the rest, waiting more than they compute.
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "long and serial" & one=$$!; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "long and not serial"; other=$$?; \
	wait $$one && exit $$other

# Published packages for tests/auditing/test_published.py, in a folder of their own: one that does not match this torch, as torchvision's
# builds do now and then, must not be importable anywhere else.
PUBLISHED := torchvision timm transformers monai torch_geometric peft accelerate huggingface_hub
# What they import beside torch; named one by one, since their own lists would bring another torch.
NEEDED := regex psutil aiohttp aiohappyeyeballs aiosignal frozenlist multidict propcache yarl attrs
ZOO := $(VENV)/.zoo-installed
zoo: $(ZOO)
$(ZOO): $(DEV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade -c constraints.txt --target $(VENV)/zoo $(PUBLISHED) $(NEEDED)
	touch $@

.PHONY: demo test test-long zoo check docs mutants bench clean
demo: $(CORE)
	$(BIN)/qbi audit

test: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not serial and not long"
	@# Tests that start processes of their own wait more than they compute: two at a time.
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "serial and not long" tests/lab/test_reproduce.py & one=$$!; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "serial and not long" --ignore tests/lab/test_reproduce.py; other=$$?; \
	wait $$one && exit $$other

check: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python checks/limits.py
	$(BIN)/python docs/render.py --check

mutants: $(DEV)
	$(BIN)/python tests/mutants.py

docs: $(DEV)
	$(BIN)/python docs/render.py

bench: $(DEV)
	$(BIN)/qbi bench

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(CORE): $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(DEV): $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[lab,text,hf,ray,flower,nvflare,dev]"
	touch $@ $(CORE)

clean:
	rm -rf $(VENV) out .mypy_cache .ruff_cache .pytest_cache
