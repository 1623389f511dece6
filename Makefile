# The project's verbs. Each sets up what it needs; CI calls the same ones (.ci/run).
#
#   make demo        flights through Spark and a store and back; make demo ARGS=--fresh starts afresh
#   make setup       .venv with everything, pinned by constraints.txt
#   make test        all tests but the slow ones   make test ARGS="-k layout"
#   make test-without-kernel  as on a machine without a C compiler: what the kernel's work is done by instead
#   make test-deep   the slow ones: the same stories, longer and at random
#   make crash       every fault injected and counted, in 25 minutes; SHARE=4, as in CI: 10   make crash ARGS="--only images --seed 7"
#   make crash-deep  the same by chance, for as long as it is told    make crash-deep SECONDS=3600 SEED=7
#                    (and 10,000 faults between Spark and a store on another host, however long they take)
#                    what a change touches: make crash CHANGED=main (planted bugs), make interop CHANGED=main
#   make interop     the files against RocketMQ's own Java store; SHARE=4, as in CI: a quarter of the random stores   make interop ARGS="-k hand_over"
#   make live        the stories beside brokers that run: Spark reads them and writes to them   make live ARGS="-k sink"
#   make live-deep   500 kills of drivers, tasks, copies, brokers and connections beside brokers that run   make live-deep FAULTS=2000 SEED=7
#   make live-demo   Spark between two topics of two brokers, one of which is killed   make live-demo ARGS="--every 1"
#   make interop-deep  more random stores, all histories, Kafka jobs and older brokers, of which interop takes a part, the replay-torture table and the race    make interop-deep STORES=2000 SEED=1000
#   make browser     the dashboard in Chromium, as people use it   make browser ARGS="-k hostile"
#   make docs-pictures  the pictures of the dashboard in the guides, anew
#   make lint        ruff and the import tower
#   make typecheck   mypy, strict
#   make bench       store, sink and source against their floors   make bench ARGS=--quick
#   make bench-peers  beside Kafka, Delta Lake, Parquet, RocketMQ's own store and other databases, in one run
#   make docs-site   the documentation as a site, in dist/site
#   make notebook    runs the notebook of the examples, and keeps what its cells print and draw
#   make wheels      the source archive, and wheels for every Linux on x86-64 and on AArch64, in dist
#   make release     the same, checked, with the list of parts (CycloneDX), SHA256SUMS, and a smoke test on each Python that is here
#   make pins        the hashes of constraints.txt, after a version in it was changed
#   make docs        regenerate the tables of store/FORMAT.md and connector/README.md, and the alerts in deploy

PYTHON ?= python3
ARGS   ?=
SECONDS ?= 3600
SEED    ?= 1
STORES  ?= 2000
HISTORIES ?= 500
FAULTS  ?= 500
SHARE   ?= 1
CHANGED ?=
BIN    := .venv/bin
STAMP  := .venv/.installed
KERNEL := store/messagestore/format/_kernel.abi3.so

.DEFAULT_GOAL := test
# Hundreds of short Python processes are started by the tests: compiling our modules in each would take half of their time.
unexport PYTHONDONTWRITEBYTECODE
# Nothing here multiplies matrices: numpy's threads for that only make each start dearer (0.4 -> 0.3 s of a processor).
export OPENBLAS_NUM_THREADS := 1
.PHONY: setup java xfs chromium maven demo cluster-demo live live-deep live-demo test test-without-kernel test-deep crash crash-deep interop interop-deep browser docs-pictures lint typecheck bench bench-peers docs docs-site notebook wheels release pins clean

setup: $(STAMP) $(KERNEL)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo 'Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11 setup' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	  || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qy python3-venv; } \
	  || { echo 'python3 -m venv does not work here. Install it (Debian: apt-get install python3-venv), then run make again.' >&2; exit 1; }
	$(PYTHON) -m venv .venv

# pip compares each file with its hash (constraints.txt), those too that build others: these come first.
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet --no-input --no-deps --no-build-isolation --use-pep517
$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@sed -n '/^# to build/,$$p' constraints.txt >.venv/to-build.txt
	$(PIP) --require-hashes --requirement .venv/to-build.txt
	$(PIP) --require-hashes --requirement constraints.txt
	$(PIP) --editable .
	@touch $@

# Asks the index of this machine, once for each Python and processor: some minutes.
pins: | $(BIN)/python
	$(BIN)/python .ci/pins.py

# The C code is compiled where there is a compiler, Debian's if need be. The store works without it, which is then said.
$(KERNEL): $(wildcard store/kernel/*) $(STAMP)
	@{ command -v "$${CC:-cc}" && $(BIN)/python -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")'; } >/dev/null 2>&1 \
	  || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qy gcc libc6-dev python3-dev; } \
	  || true
	$(BIN)/python store/kernel/compile.py

# Spark needs a full JRE, 17 or newer: the one that is there, else Debian's.
java:
	@found=$$("$${JAVA_HOME:+$$JAVA_HOME/bin/}java" -version 2>&1 | sed -n 's/.*version "\([0-9]*\).*/\1/p'); \
	[ "$${found:-0}" -ge 17 ] \
	  || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qy default-jre-headless; } \
	  || { echo "Spark needs Java 17 or newer (a full JRE), found $${found:-none}. Debian: apt-get install default-jre-headless" >&2; exit 1; }

# Spark as the tests start it: JVMs and Python workers run in half of the time.
.venv/spark/classes.jsa: $(STAMP)
	@$(MAKE) --no-print-directory java
	$(BIN)/python tests/spark_home.py

# Power is cut on ext4 and XFS images, which needs root; what cannot be done says so in the result.
xfs:
	@command -v mkfs.xfs >/dev/null || PATH="$$PATH:/sbin:/usr/sbin" command -v mkfs.xfs >/dev/null \
	  || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qy xfsprogs; } \
	  || echo '==> no mkfs.xfs: no power is cut on XFS' >&2

demo: setup java
	cd examples/01_flights && ../../$(BIN)/python flights.py $(ARGS)

# A store on another host: Spark's processes get a network of their own, which needs root and `ip`.
cluster-demo: setup java
	@{ command -v ip && command -v openssl; } >/dev/null \
	  || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qy iproute2 openssl; } \
	  || true
	$(BIN)/python examples/11_cluster/cluster_demo.py $(ARGS)

# RocketMQ's own servers and clients, which Maven fetches; Spark is started as the tests start it.
live-demo: setup
	@$(MAKE) --no-print-directory maven
	$(BIN)/python examples/12_live/live_demo.py $(ARGS)

# Stores are made in memory where there is room: syncs cost nothing there (`make crash` cuts the power of real disks).
# One process more than there are cores: some tests wait for processes of their own.
# The order of files is that of tests/conftest.py: xdist's own begins with those that have the most tests, and so it ends with
# the longest ones, which have a test or two.
# Without Java the store's tests still run; the Spark tests say that they are skipped, and why.
test: export PYTEST_DEBUG_TEMPROOT ?= $(shell df --output=avail /dev/shm 2>/dev/null | awk 'NR == 2 && $$1 > 8000000 {print "/dev/shm"}')
test: setup
	@$(MAKE) --no-print-directory .venv/spark/classes.jsa || echo '==> no Java: the Spark tests are skipped' >&2
	$(BIN)/python -m pytest -n $$(($$(nproc) + 1)) --dist loadfile --no-loadscope-reorder --ignore tests/interop -m 'not slow and not java and not browser' $(ARGS)

# The packages whose modules call the kernel (tests/test_house.py finds them), and what puts and reads whole stores by them.
WITHOUT_KERNEL := tests/store/format tests/store/files tests/store/batches tests/property
test-without-kernel:
	MESSAGESTORE_KERNEL=off $(MAKE) --no-print-directory test ARGS='$(WITHOUT_KERNEL) $(ARGS)'

test-deep: setup
	$(BIN)/python -m pytest -m 'slow and not java and not browser' $(ARGS)

# What is missing is skipped, aloud; in CI a skip is a failure (tests/interop/conftest.py).
# Three processes more than there are cores: most tests wait for brokers, for their timers and for the seconds that each takes
# to stop. Who runs what is said in tests/interop/conftest.py; the order is that of tests/conftest.py.
# Of histories, Kafka jobs and older brokers it takes a part, which the day chooses (tests/interop/share.py): make interop INTEROP_DAY=739581
interop: export INTEROP_SHARE := $(SHARE)
interop: export INTEROP_CHANGED := $(CHANGED)
interop: setup
	@$(MAKE) --no-print-directory maven || echo '==> no Maven: the interop tests are skipped' >&2
	@$(MAKE) --no-print-directory .venv/spark/classes.jsa || echo '==> no Java: the Spark tests are skipped' >&2
	$(BIN)/python -m pytest -n $$(($$(nproc) + 3)) --dist loadscope --no-loadscope-reorder -m java tests/interop \
	  $(addprefix --ignore tests/interop/test_,replay_torture.py live_race.py) $(ARGS)

# A part of `interop`: brokers, name servers and clients of RocketMQ that run.
live: setup
	@$(MAKE) --no-print-directory maven || echo '==> no Maven: the live tests are skipped' >&2
	$(BIN)/python -m pytest -m java $(addprefix tests/interop/test_live_,source.py changes.py messages.py sink.py old_brokers.py forms.py copy.py job.py kills.py) $(ARGS)

live-deep: setup
	@$(MAKE) --no-print-directory maven
	PYTHONPATH=faults:tests $(BIN)/python -m interop.kills --faults $(FAULTS) --seed $(SEED) $(ARGS)

# The files of which interop takes a part (tests/interop/test_share.py compares).
IN_PARTS := $(addprefix tests/interop/test_,broker_stores.py crash_hand_over.py hand_over.py java_reads_ours.py kafka_drop_in.py kafka_jobs.py \
  model_histories.py names.py same_bytes.py timers.py topic_deletion.py transactions.py we_read_java.py)
interop-deep: setup
	@$(MAKE) --no-print-directory maven || echo '==> no Maven: the interop tests are skipped' >&2
	INTEROP_WHOLE=1 INTEROP_STORES=$(STORES) INTEROP_HISTORIES=$(HISTORIES) INTEROP_SEED=$(SEED) \
	  $(BIN)/python -m pytest -n 2 --dist worksteal -m java $(IN_PARTS) tests/interop/test_replay_torture.py tests/interop/test_live_race.py $(ARGS)

# The Java driver of the interop tests is built with Maven and a JDK.
maven: java
	@{ command -v mvn && command -v javac; } >/dev/null \
	  || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qy maven default-jdk-headless; } \
	  || { echo 'The interop tests need Maven and a JDK 17 or newer. Debian: apt-get install maven default-jdk-headless' >&2; exit 1; }

# Only the mode `spark`, which is part of a run of all modes, starts a Spark.
CRASH_SPARK = $(if $(CHANGED)$(filter --only --only=%,$(ARGS)),$(findstring spark,$(ARGS)),all)
crash: setup xfs
	@$(if $(CRASH_SPARK),$(MAKE) --no-print-directory .venv/spark/classes.jsa || echo '==> no Java: the cells of a real Spark are left out' >&2,:)
	PYTHONHASHSEED=0 PYTHONPATH=faults:tests $(BIN)/python -m crash --share $(SHARE) $(addprefix --changed ,$(CHANGED)) $(ARGS)

crash-deep: setup xfs
	@$(MAKE) --no-print-directory java || echo '==> no Java: the cells of a real Spark are left out' >&2
	PYTHONHASHSEED=0 PYTHONPATH=faults:tests $(BIN)/python -m crash --deep $(SECONDS) --seed $(SEED) $(ARGS)

# Debian's Chromium where there is none: Playwright drives it, and downloads no browser of its own.
chromium:
	@command -v chromium >/dev/null \
	  || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends chromium; } \
	  || { echo 'There is no Chromium. Debian: apt-get install chromium' >&2; exit 1; }

# What is missing is skipped, aloud; in CI a skip is a failure (tests/browser/conftest.py).
browser: setup
	@$(MAKE) --no-print-directory chromium || echo '==> no Chromium: the browser tests are skipped' >&2
	$(BIN)/python -m pytest -m browser tests/browser $(ARGS)

# The tests compare the words of each picture with those of the page.
docs-pictures: setup chromium
	MESSAGESTORE_PICTURES=docs/assets $(BIN)/python -m pytest -m browser tests/browser/test_pictures.py $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

typecheck: setup
	$(BIN)/mypy

# Without Java the store's figures are still taken.
bench: setup
	$(BIN)/python -m benchmarks store $(ARGS)
	$(BIN)/python -m benchmarks queues $(ARGS)
	@if $(MAKE) --no-print-directory java; then \
	  $(BIN)/python -m benchmarks sink $(ARGS) && $(BIN)/python -m benchmarks source $(ARGS) \
	    && $(BIN)/python -m benchmarks profile $(ARGS); \
	else echo '==> no Java: the figures of sink and source are left out' >&2; fi

# Downloads what is missing into .venv/peers; what cannot be had is left out, and the result says so.
bench-peers: setup
	@$(MAKE) --no-print-directory maven || echo '==> no Maven: who needs it is left out' >&2
	$(BIN)/python -m benchmarks.peers $(ARGS)

# runpy warns that the package has imported the module before it runs it; here that does no harm.
docs: setup
	$(BIN)/python -W ignore::RuntimeWarning:runpy -m messagestore.format.layout store/FORMAT.md
	$(BIN)/python -m pyspark_messagestore.options.table connector/README.md
	$(BIN)/python -m pyspark_messagestore.monitoring.alerts deploy

docs-site: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo 'dist/site/index.html'

notebook: setup java
	$(BIN)/python .ci/notebook.py

# The wheels are built from the source archive, one by a compiler for the other processor. With the kernel, a wheel gets the tag
# of the oldest glibc that it runs on.
OTHER := $(if $(filter aarch64,$(shell uname -m)),x86-64,aarch64)
CROSS := $(subst -,_,$(OTHER))-linux-gnu-gcc
wheels: setup
	@command -v $(CROSS) >/dev/null \
	  || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qy gcc-$(OTHER)-linux-gnu; } \
	  || { echo 'There is no $(CROSS). Debian: apt-get install gcc-$(OTHER)-linux-gnu' >&2; exit 1; }
	rm -f dist/*.whl dist/*.tar.gz dist/*.cdx.json dist/SHA256SUMS
	$(BIN)/python -m hatchling build -d dist -t sdist
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist dist/*.tar.gz
	CC=$(CROSS) $(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist dist/*.tar.gz
	@set -e; for made in dist/*-linux_*.whl; do [ -e "$$made" ] || continue; \
	  PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist "$$made"; rm "$$made"; done
	@ls dist/*.tar.gz dist/*.whl

release: wheels
	$(BIN)/python .ci/release.py dist

clean:
	rm -rf .venv dist build store/messagestore/format/_kernel.abi3.so .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
