# The two commands of the README, `make demo` and `make test`, work alone on a fresh checkout with
# Python 3.11+: each sets up a virtual environment in .venv first. Nothing outside the checkout changes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# The stub generator is old on purpose (docs/decisions/0013-decided-against.md) and would pull the runtime down with it.
PROTO_VENV := .venv-proto
PROTO_READY := $(PROTO_VENV)/.ready
# The storage server of the paper's experiment: nothing else needs it.
PAPER_VENV := .venv-paper
MATRIX_VENVS := .venv-matrix
PROTOS := $(wildcard proto/fastcheck_proto/v1/*.proto)
# The libraries that benchmarks compare with stay out of the dev environment.
PEERS := tests/benchmarks/peers
PEERS_VENV := .venv-peers
PEERS_READY := $(PEERS_VENV)/.ready
TORCHSTORE_VENV := .venv-peers-torchstore
BUF := @bufbuild/buf@1.75.0

.PHONY: demo test bytecode test-clusters test-rest test-long simulate soak fuzz lint format bench bench-peers peers-torchstore \
	bench-paper bench-paper-server matrix man screenshots docs \
	locks sbom proto clean help

help:
	@echo "make demo   train on 4 nodes, lose one, resume bit for bit from the others' RAM (about 3 minutes)"
	@echo "make test   all tests        make lint   all checks        make format  let ruff format"
	@echo "make test-long  what make test has a few rounds of, for many: kills of all voters, all pairs of layouts"
	@echo "make simulate SEEDS=1-1000   whole clusters in virtual time, with faults, each from its seed"
	@echo "make soak MINUTES=10 SEED=1  a job trains on five nodes while faults fall, each of them real"
	@echo "make man    the man page         make screenshots   the pictures in docs/cli.md, of a real cluster"
	@echo "make fuzz EXAMPLES=2000      so many inputs of each kind that somebody may send or leave (docs/security.md)"
	@echo "make bench  the figures      make proto  regenerate stubs  make clean   remove what these made"
	@echo "make bench-peers  the same state saved by others, side by side (ARGS=--quick to see that it runs)"
	@echo "make docs   the documentation as a site, in site/"
	@echo "make matrix a smoke test with other versions of torch and protobuf (downloads gigabytes; docs/versions.md)"

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "FastCheck needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

$(PROTO_READY):
	$(PYTHON) -m venv $(PROTO_VENV)
	$(PROTO_VENV)/bin/pip install --quiet --disable-pip-version-check \
		grpcio-tools==1.63.2 mypy-protobuf==3.7.0 'setuptools<81'
	touch $@

demo: $(READY)
	$(BIN)/fastcheck demo

# Tests of clusters wait for half of their time, WORKERS files at a time. All other tests only compute, and do that beside
# them, one at a time and with less of a right to the cores than whoever waits for a daemon.
CLUSTERS := tests/cluster tests/netlab
WORKERS ?= 2
BESIDE := --numprocesses=$(WORKERS) --dist=loadfile
ALONE := $(CLUSTERS) tests/unit/fastcheckd/process
REST := $(BESIDE)
test: $(READY) bytecode
	@failed=0; \
	$(MAKE) --no-print-directory --keep-going --jobs=2 --output-sync=target REST= test-rest test-clusters || failed=1; \
	$(MAKE) --no-print-directory test-alone || failed=1; \
	exit $$failed

# Once for the thousand processes that the tests start: with PYTHONDONTWRITEBYTECODE each would compile all of it.
bytecode: $(READY)
	$(BIN)/python -m compileall -q daemon client proto tests

test-rest: $(READY)
	nice -n 10 $(BIN)/python -m pytest $(REST) --durations=10 -m 'not alone and not long' $(CLUSTERS:%=--ignore=%)

test-clusters: $(READY)
	$(BIN)/python -m pytest $(BESIDE) --durations=15 -m 'not alone and not long' $(CLUSTERS)

# What keeps all cores busy, or judges times or how a link is shared: nothing runs beside it.
test-alone: $(READY)
	$(BIN)/python -m pytest --durations=5 -m 'alone and not long' $(ALONE)

# The same tests for many rounds: hours, and not part of make test.
test-long: $(READY) bytecode
	$(BIN)/python -m pytest --durations=0 -m long -s tests

SEEDS ?= 1-1000
simulate: $(READY)
	$(BIN)/python -m tests.simulation --seeds $(SEEDS)

# Five nodes, three trainers, and seeded faults for so long; fails if a promise was broken. SEED=… replays the faults.
MINUTES ?= 10
soak: $(READY) bytecode
	$(BIN)/python -m tests.soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

# The tests by themselves try a few hundred inputs of each kind.
EXAMPLES ?= 2000
FUZZ := $(wildcard tests/*/test_*_fuzz.py tests/unit/*/test_*_fuzz.py tests/unit/*/*/test_*_fuzz.py)
fuzz: $(READY)
	FASTCHECK_FUZZ_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest --timeout=0 $(FUZZ)

lint: $(READY) $(PROTO_READY)
	@if git grep -nE '^(<{7}|>{7}) '; then echo "a merge was left unfinished"; exit 1; fi
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/bandit --quiet --configfile pyproject.toml --recursive daemon/fastcheckd client/fastcheck
	@rm -rf .stubs && mkdir .stubs
	@$(call generate,.stubs)
	@for f in .stubs/fastcheck_proto/v1/*; do cmp "$$f" "proto/fastcheck_proto/v1/$$(basename $$f)" \
		|| { echo "stale stubs: run 'make proto'"; exit 1; }; done
	@rm -rf .stubs && echo "stubs are fresh"
	@if command -v npx >/dev/null; then cd proto && npx --yes $(BUF) lint && echo "buf lint passed"; \
		else echo "buf lint skipped: no npm here"; fi

# What the commands' help says, as a man page; `pip install` puts it where man(1) looks.
man: $(READY)
	$(BIN)/python -m fastcheck.cli.manual > client/man/fastcheck.1

screenshots: $(READY)
	$(BIN)/python -m tests.cluster.screenshots

SUPPLY_VENV := .venv-supply
SUPPLY_READY := $(SUPPLY_VENV)/.ready
COMPILE := $(SUPPLY_VENV)/bin/pip-compile --quiet --strip-extras --generate-hashes --no-emit-index-url \
	--no-emit-find-links --no-header --annotation-style=line --constraint constraints.txt
$(SUPPLY_READY):
	$(PYTHON) -m venv $(SUPPLY_VENV)
	$(SUPPLY_VENV)/bin/pip install --quiet --disable-pip-version-check pip-tools==7.6.2 cyclonedx-bom==7.5.0
	touch $@

# What the image is made of, by hash: after a change of dependencies or of constraints.txt.
locks: $(SUPPLY_READY)
	$(COMPILE) --extra daemon --extra cli --extra certs --extra tokens --output-file deploy/docker/requirements.txt pyproject.toml
	echo hatchling | $(COMPILE) --output-file deploy/docker/build-requirements.txt -

# A bill of materials (CycloneDX) of what the image is made of.
sbom: $(SUPPLY_READY)
	$(SUPPLY_VENV)/bin/cyclonedx-py requirements --pyproject pyproject.toml --output-reproducible \
		--output-file fastcheck.cdx.json deploy/docker/requirements.txt

# The site that docs/ makes, in site/; it loads nothing from elsewhere.
DOCS_VENV := .venv-docs
DOCS_READY := $(DOCS_VENV)/.ready
$(DOCS_READY): pyproject.toml constraints.txt docs/site/requirements.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--requirement docs/site/requirements.txt --editable '.[daemon,cli,certs]'
	touch $@

# Draws the diagrams. The theme would load it from another server; without npm the site shows them as text.
MERMAID := mermaid@11.17.2
DOCS_MERMAID := $(DOCS_VENV)/mermaid.min.js
$(DOCS_MERMAID): $(DOCS_READY)
	@cd $(DOCS_VENV) && { npm pack --silent $(MERMAID) >/dev/null \
		&& tar -xzmf mermaid-*.tgz --strip-components=2 package/dist/mermaid.min.js && rm mermaid-*.tgz; } \
		|| echo "the site shows diagrams as text: npm cannot fetch $(MERMAID)"

docs: $(DOCS_READY) $(DOCS_MERMAID)
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --quiet --strict && echo "the site is in site/"

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(READY)
	$(BIN)/python -m tests.benchmarks

$(PEERS_READY): $(PEERS)/requirements.txt
	$(PYTHON) -m venv $(PEERS_VENV)
	$(PEERS_VENV)/bin/pip install --quiet --disable-pip-version-check --requirement $<
	touch $@

# One that cannot be installed is reported by the benchmark, not by make.
bench-peers: $(READY)
	-$(MAKE) --no-print-directory $(PEERS_READY)
	$(BIN)/python -m tests.benchmarks.peers $(ARGS)

peers-torchstore:
	$(PYTHON) -m venv $(TORCHSTORE_VENV)
	$(TORCHSTORE_VENV)/bin/pip install --quiet --disable-pip-version-check --requirement $(PEERS)/requirements-torchstore.txt

bench-paper-server:
	$(PYTHON) -m venv $(PAPER_VENV)
	$(PAPER_VENV)/bin/pip install --quiet --disable-pip-version-check \
		--requirement tests/benchmarks/paper-requirements.txt

bench-paper: $(READY) bench-paper-server
	$(BIN)/python -m tests.benchmarks --only paper

# Not part of `make test`: each version of torch that has no CPU build here takes gigabytes.
matrix: $(READY)
	$(BIN)/python -m tests.matrix $(ARGS)

proto: $(PROTO_READY)
	$(call generate,proto)

define generate
	PATH="$(CURDIR)/$(PROTO_VENV)/bin:$$PATH" $(PROTO_VENV)/bin/python -m grpc_tools.protoc -Iproto \
		--python_out=$(1) --grpc_python_out=$(1) --mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) $(PROTOS)
endef

clean:
	rm -rf $(VENV) $(PROTO_VENV) $(PEERS_VENV) $(TORCHSTORE_VENV) $(PAPER_VENV) $(MATRIX_VENVS) $(DOCS_VENV) site .stubs .mypy_cache .ruff_cache .pytest_cache \
		.hypothesis .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
