# make install: a virtual environment in .venv, with the versions of constraints.txt
# make search: a virtual environment, the install, and a plan for GPT-2 on this machine
# make test:   the same environment, the linters and most of the tests (what CI runs)
# make quick:  the same without the slow tests
# make test-all: what `make test` leaves out because others are like it: about two hours
# make test-timing: the tests that compare measured times, on an idle machine
# make test-engines: real PostgreSQL, SLURM, Ray and torchrun on this machine; what cannot start fails with its reason
# make test-screenshots [ACCEPT=1]: the report page in Chromium, wide and narrow, against the accepted screenshots
# make docs:   the documentation with the API reference, in site/; ends with an error if a link is dead
# make test-torchao: the tests that need torchao, which gets a folder of its own (a part of `make test`)
# make test-parity: the parity check on some hundred correct variants and on planted bugs
# make test-plans: 10,000 changed plans through show, explain and report, 200 through each other command
# make test-exports: the exported files train as a plain loop does, each in its tool, which gets an environment
# make test-zoo [WORKLOADS="llama vision"]: strangers' trainings, each searched, checked and applied, as a table
# make test-packages [TRAININGS="timm fno"] [BUDGET=20s]: trainings of packages from PyPI, each searched, as a table
# make bench-search: the brief form of the benchmarks of searches
# make soak [MINUTES=60]: searches that are killed at random and resumed; one line of figures
# make accuracy [TRIALS="search.json store/"]: the cost model against published tables and recorded searches
PYTHON ?= python3
VENV ?= .venv
# Other versions: make quick VENV=.venv-2.11 CONSTRAINTS=tests/constraints/torch-2.11.txt PYTHON=python3.12
# The types are checked with the pinned torch alone: what torch declares differs by version, what it does is tested.
CONSTRAINTS ?= constraints.txt
TYPES := $(if $(filter constraints.txt,$(CONSTRAINTS)),types)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS)

# Tests run small tensors: one thread each is quicker than a pool, and kinder to whoever shares the machine.
TEST_ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# Two workers, each with whole files: a module's fixtures (a zygote, a finished search) are made once. The order of the
# files is that of tests/conftest.py. Tests that a second busy core would disturb are marked `alone`; they run afterwards.
PYTEST := $(TEST_ENV) $(BIN)/python -m pytest
TWO_WORKERS := -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: install search test test-parity test-zoo quick lint types docs soak accuracy clean

install: $(VENV)/.installed

search: $(VENV)/.installed
	$(BIN)/autoplan search --model gpt2

# What fails is run once more, alone: machines are shared, and a test of real processes can meet a stalled one. The
# second run is a summary of its own, so that what needed it is seen; what fails there has failed.
tested = $(PYTEST) $(1) -m "$(2)" || { test $$? -eq 1 && $(PYTEST) --last-failed --maxfail=3 -m "$(2)"; }

test: lint types
	$(call tested,$(TWO_WORKERS) --durations=15,not alone and not timing and not exhaustive and not environment and not engines and not torchao)
	$(call tested,--durations=5,alone and not exhaustive)
	$(MAKE) test-torchao

# torchao stays out of the environment: transformers imports it with every model, wherever it finds it.
.PHONY: test-torchao
test-torchao: $(VENV)/torchao
	PYTHONPATH=$(abspath $(VENV)/torchao) $(PYTEST) $(TWO_WORKERS) -m "torchao and not exhaustive"

test-parity: $(VENV)/.installed-test
	$(PYTEST) $(TWO_WORKERS) tests/planner/parity

.PHONY: test-all
test-all: $(VENV)/.installed-test
	$(PYTEST) $(TWO_WORKERS) --durations=15 -m "exhaustive and not alone and not environment and not engines"
	$(PYTEST) -m "exhaustive and alone and not environment"

# What is measured here is what other work on the machine changes, so it is no part of `make test`.
.PHONY: test-timing
test-timing: $(VENV)/.installed-test
	$(PYTEST) --durations=15 -m "timing and not exhaustive"

.PHONY: test-plans
test-plans: $(VENV)/.installed-test
	$(PYTEST) -s tests/planner/records/test_plan_fuzz.py

# Not in `make test`: it installs PostgreSQL and SLURM if they are missing (as root by apt-get), and starts them itself.
# With CANDIDATES=40 also the same search on each engine, as a table. Each part runs, also after one that failed.
ENGINE_PARTS := "pytest --durations=10 tests/engines" \
  "tests.engines.soak --kills $(or $(KILLS),100)" "tests.engines.soak_nodes --kills $(or $(KILLS),100)" \
  $(if $(CANDIDATES),"tests.engines.same_study --candidates $(CANDIDATES)") \
  "tests.engines.clients --clients $(or $(CLIENTS),1000) --studies 20 --pause 10 --seconds 30"
.PHONY: test-engines
test-engines: $(VENV)/.installed-test
	$(PIP) -e '.[postgres,ray]'
	$(BIN)/python -m tests.engines.install
	failed=0; for part in $(ENGINE_PARTS); do \
	  echo "$$part"; $(TEST_ENV) $(BIN)/python -m $$part || { failed=1; echo "FAILED: $$part"; }; \
	done; exit $$failed

# Not in `make test`: it needs Chromium, and the accepted pictures are of one machine's fonts.
.PHONY: test-screenshots
test-screenshots: $(VENV)/.installed-screenshots
	$(TEST_ENV) $(BIN)/python -m tests.report.screenshots $(if $(ACCEPT),--accept)

# The environments are in .venv-exports/; each is made again where its requirements changed.
.PHONY: test-exports
test-exports: $(VENV)/.installed-test
	$(BIN)/python -m tests.exports.environments $(filter-out packages,$(basename $(notdir $(wildcard tests/exports/environments/*.txt))))
	$(PYTEST) $(TWO_WORKERS) --durations=15 tests/exports

test-zoo: $(VENV)/.installed-zoo
	$(TEST_ENV) $(BIN)/python -m tests.zoo.plain_loop $(WORKLOADS)
	$(TEST_ENV) $(BIN)/python -m tests.zoo.run $(WORKLOADS)
	$(TEST_ENV) $(BIN)/python -m tests.zoo.same_training $(WORKLOADS)

# The environment is .venv-exports/packages. Without BUDGET each training is looked at alone: some minutes in all.
.PHONY: test-packages
test-packages: $(VENV)/.installed-test
	$(TEST_ENV) PYTHONPATH=$(CURDIR) $$($(BIN)/python -m tests.exports.environments packages) -m tests.packages.run \
	  $(TRAININGS) $(if $(BUDGET),--budget $(BUDGET))

quick: lint $(TYPES)
	$(PYTEST) $(TWO_WORKERS) -m "not slow and not exhaustive and not alone and not timing and not environment and not engines"
	$(PYTEST) -m "alone and not slow and not exhaustive"

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/python -m benchmarks.code_size

types: $(VENV)/.installed-test
	$(BIN)/mypy

docs: $(VENV)/.installed-docs
	rm -rf build/docs && mkdir -p build/docs
	cp -R README.md CONTRIBUTING.md CHANGELOG.md LICENSE docs examples build/docs
	$(BIN)/zensical build --clean
	$(BIN)/python docs/check_site.py site

soak: $(VENV)/.installed
	$(TEST_ENV) $(BIN)/python -m benchmarks.soak --minutes $(or $(MINUTES),60)

accuracy: $(VENV)/.installed
	$(BIN)/python -m benchmarks.accuracy $(if $(TRIALS),--trials $(TRIALS))

# At most 20 minutes, and the replays some minutes more; docs/scoreboard.md has the long forms.
.PHONY: bench-search
bench-search: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks.anytime --brief --out .cache/anytime.jsonl
	$(BIN)/python -m benchmarks.search_replay --seeds $(or $(SEEDS),3) --methods ours random
	@echo "To record a table: $(BIN)/python -m benchmarks.search_tables --case gpt --ranks 1 (docs/scoreboard.md)"

$(VENV)/.installed: pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	touch $@

$(VENV)/torchao: $(VENV)/.installed-test
	$(PIP) --no-deps --target $@ torchao
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) -e '.[test]'
	touch $@

# peft brings nothing but itself: the rest of what it needs is installed already
$(VENV)/.installed-zoo: $(VENV)/.installed-test
	$(PIP) peft==0.21.2
	touch $@

$(VENV)/.installed-screenshots: $(VENV)/.installed-test
	$(PIP) pillow
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(PIP) -e '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) .venv-exports build dist site .cache *.egg-info
