# Two commands matter: `make demo` does the main job, `make test` runs the tests.
# Each sets up what it needs in .venv first.
.DEFAULT_GOAL := demo
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Without bytecode, which takes a third of the time: it is made where a module is first imported.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
CORE := $(VENV)/.core-installed
DEV := $(VENV)/.dev-installed
SITE := $(VENV)/.site-installed

test-long: $(DEV)
	@# Where the packages cannot be had, their tests are skipped and say so.
	-@$(MAKE) --no-print-directory zoo
	@# Federations of real processes use fixed ports: one after another, beside the rest, waiting more than they compute.
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "long and serial" --durations=10 & one=$$!; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "long and not serial" --durations=15; other=$$?; \
	wait $$one && exit $$other

# Published packages for tests/auditing/test_published.py, in a folder of their own: one that does not match this torch, as torchvision's
# builds do now and then, must not be importable anywhere else.
PUBLISHED := torchvision timm transformers monai torch_geometric peft accelerate huggingface_hub
# What they import beside torch; named one by one, since their own lists would bring another torch.
NEEDED := regex psutil aiohttp aiohappyeyeballs aiosignal frozenlist multidict propcache yarl attrs
ZOO := $(VENV)/.zoo-installed
zoo: $(ZOO)
$(ZOO): $(DEV)
	$(INSTALL) --no-deps --upgrade --target $(VENV)/zoo $(PUBLISHED) $(NEEDED)
	touch $@

.PHONY: demo test test-long zoo check docs site tutorials mutants bench coverage clean
demo: $(CORE)
	$(BIN)/qbi audit

# Without checks of shapes in signatures, which take a quarter of the time; plain `pytest` and `make test-long` have them.
QUICKLY := QBI_QUICK=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest
test: $(DEV)
	$(QUICKLY) -n 2 --dist worksteal -m "not serial and not long"
	@# Tests that start processes of their own wait more than they compute: two at a time.
	@$(QUICKLY) -m "serial and not long" tests/lab/test_reproduce.py & one=$$!; \
	$(QUICKLY) -m "serial and not long" --ignore tests/lab/test_reproduce.py; other=$$?; \
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

coverage: $(DEV)
	$(BIN)/qbi measure coverage

tutorials: $(DEV)
	-@$(MAKE) --no-print-directory zoo
	OMP_NUM_THREADS=1 $(BIN)/python docs/notebooks.py

# The documentation site, in out/site. Warnings are errors, and so is a link that leads nowhere. `make site NOTEBOOKS=execute` runs the
# notebooks of docs/tutorials on the way.
site: $(SITE) $(if $(NOTEBOOKS),$(DEV))
	rm -rf out/site
	$(if $(NOTEBOOKS),QBI_NOTEBOOKS=force) $(BIN)/python -m sphinx -b html -n -W --keep-going -q docs out/site
	$(BIN)/python docs/links.py out/site

bench: $(DEV)
	$(BIN)/qbi bench

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(CORE): $(BIN)/python pyproject.toml constraints.txt
	$(INSTALL) -e .
	touch $@

$(DEV): $(BIN)/python pyproject.toml constraints.txt
	$(INSTALL) -e ".[lab,text,hf,ray,flower,nvflare,dev]"
	touch $@ $(CORE)

$(SITE): $(BIN)/python pyproject.toml constraints.txt
	$(INSTALL) -e ".[lab,site]"
	touch $@ $(CORE)

clean:
	rm -rf $(VENV) out .mypy_cache .ruff_cache .pytest_cache
