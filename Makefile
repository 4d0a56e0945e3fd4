# The two commands to know: `make demo` and `make test`. Either creates .venv on its first run only.
# `make calibrate` and `make long` run the tests that take longer; `benchmarks/costs_of_tests.py` measures all three.

PYTHON ?= $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# On small tensors a second thread only spins; the second core serves the second test process instead.
export OMP_NUM_THREADS := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test calibrate long lint types doctest docs docs-small browser install clean

install: $(STAMP)

# torch first and alone, so that pip never weighs it against the rest; the build back end is pinned as well.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)" -c constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt hatchling editables
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e ".[dev]"
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/bayeskit evidence primates --out demo

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not calibration and not long" tests

calibrate: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m calibration tests

long: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m long tests

lint: $(STAMP)
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

doctest: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal --doctest-modules bayeskit

# Every page of the gallery at full size; `docs-small` runs them in seconds.
docs: $(STAMP)
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	$(BIN)/python -m pytest docs/tests/test_site.py

docs-small:
	BAYESKIT_SMALL_EXAMPLES=1 $(MAKE) docs

# Needs the pages of `make docs`, and Debian's packages chromium and chromium-driver.
browser: $(STAMP)
	$(BIN)/python -m pytest docs/tests/test_browser.py

clean:
	rm -rf docs/_build docs/api docs/gallery demo out build dist .pytest_cache .mypy_cache .ruff_cache
