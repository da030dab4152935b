# Each target makes .venv where it is missing (scripts/bootstrap.sh) and then runs one command in it.

BIN := .venv/bin

.PHONY: help demo test full soak bench lint docs

help:  ## Show the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

demo:  ## A real MoE model through the nodes, compared with the plain one
	@sh scripts/bootstrap.sh test
	$(BIN)/layernodes demo

test:  ## The test suite
	@sh scripts/bootstrap.sh test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

full:  ## The test suite with the whole matrix, long property runs and time bars
	@sh scripts/bootstrap.sh test
	OMP_NUM_THREADS=1 LAYERNODES_FULL=1 $(BIN)/python -m pytest -m ""

soak:  ## 10,000 random schedules of random configurations, then the whole matrix of configurations
	@sh scripts/bootstrap.sh test
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.support.soak
	$(BIN)/python -W ignore -m tests.support.matrix

bench:  ## Every benchmark that this machine can run, in under 15 minutes
	@sh scripts/bootstrap.sh test
	$(BIN)/python -m benchmarks

lint:  ## ruff, mypy, and pyright on what a user writes
	@sh scripts/bootstrap.sh dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict
	$(BIN)/mypy --strict tests/typed_sample.py
	$(BIN)/basedpyright --pythonpath $(BIN)/python

docs:  ## The documentation, into site/; any warning is an error
	@sh scripts/bootstrap.sh docs
	PYTHONPATH=. NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
