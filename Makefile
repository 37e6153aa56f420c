# `make demo` and `make test` are all that a new machine with Python, a C++ compiler and make needs.
# Each makes .venv first; it is installed again when what it was made from has changed.

BIN := .venv/bin
TREE := $(patsubst %/__init__.py,%,$(wildcard */__init__.py))
# Copied or compiled at install time. Other Python files are read where they lie.
INSTALLED := $(shell find csrc -name '*.[ch]pp') CMakeLists.txt pyproject.toml constraints.txt LICENSE \
	__init__.py __main__.py errors.py py.typed _core.pyi scripts/install.sh
# A development install serves the demo, too.
READY := $(firstword $(wildcard .venv/dev.stamp) .venv/run.stamp)

.PHONY: demo test test-long check bench clean FORCE
.DELETE_ON_ERROR:

demo: $(READY)
	scripts/demo.sh

test: .venv/dev.stamp
	$(BIN)/python -m pytest -m "not long"

test-long: .venv/dev.stamp
	scripts/test-long.sh

check: .venv/dev.stamp
	scripts/check.sh

bench: .venv/dev.stamp
	scripts/bench.sh

clean:
	rm -rf .venv build dist finemoe-results .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/run.stamp: $(INSTALLED) build/installed-files
	@scripts/install.sh
	@touch $@

.venv/dev.stamp: $(INSTALLED) build/installed-files
	@scripts/install.sh dev,demo
	@touch $@ .venv/run.stamp

# An editable install knows the files that were there when it was made, and where: a file that comes or goes, or
# a moved checkout, asks for another.
build/installed-files: FORCE
	@mkdir -p build
	@{ pwd; find $(TREE) -name __pycache__ -prune -o -type f -print | LC_ALL=C sort; } > $@.new
	@if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi
