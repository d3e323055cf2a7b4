# The Memory Budget. `make help` lists the commands.

VENV ?= .venv
PORT ?= 8000
SIZE ?= tiny
OUT ?= _build/records
N ?= 150
SEED ?= 0
PY := $(VENV)/bin/python
ALONE := $(PY) tools/alone.py
# What is used of 16 000 modules is compiled when it is first imported.
PIP := $(ALONE) $(PY) -m pip install --quiet --disable-pip-version-check \
  --no-compile
SITE := _build/html
WHOLE := _build/whole

# Parallel tests must not fight for the cores, and sums are added in one order.
export OMP_NUM_THREADS := 1

# Kernels and ranks are processes: the package is compiled once for all of them.
unexport PYTHONDONTWRITEBYTECODE

# Under LC_ALL=C older Pythons cannot read the path of a clone in a Büro.
ifneq (,$(filter C POSIX,$(LC_ALL)))
unexport LC_ALL
endif

# Jupyter and Matplotlib keep files at home: who has none gets one.
ifneq ($(shell test -w "$$HOME" && echo yes),yes)
export HOME := $(CURDIR)/_build/home
$(shell mkdir -p "$(HOME)")
endif

.DEFAULT_GOAL := help
.PHONY: help book serve test lab notebooks translations pictures measure \
        peers zoo bench soak mutate matrix lint constraints clean FORCE

help:  ## list the commands
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) \
	  | sed -E 's/:.*## /\t/' | awk -F '\t' '{printf "make %-13s%s\n", $$1, $$2}'

# A build that was broken off leaves pages that the next one takes for whole:
# without the word of the last one that it ended well, it is begun anew.
book: $(VENV)/book.stamp  ## build the book and say where it is
	@[ -e $(WHOLE) ] || rm -rf $(SITE) _build/.doctrees _build/jupyter_execute
	@rm -f $(WHOLE)
	@$(ALONE) $(PY) tools/build_book.py
	@$(ALONE) $(PY) tools/site_checks.py $(SITE)
	@touch $(WHOLE)
	@$(PY) -c 'import pathlib; print("The book:", \
	  pathlib.Path("$(SITE)/index.html").resolve().as_uri())'

serve: book  ## build the book and show it (PORT=8000)
	$(PY) -m http.server --bind 127.0.0.1 --directory $(SITE) $(PORT)

# What has a subject's name, or a page's: NAME=accumulation, NAME=03_accumulation.
OF := tests/$(NAME) tests/widgets/$(NAME) \
  tests/exercises/test_$(NAME).py tests/experiments/test_$(NAME).py \
  $(foreach form,%.ipynb ??_%.ipynb lab?_%.ipynb,\
  $(foreach folder,chapters labs,$(folder)/$(subst %,$(NAME),$(form))))
FOUND := $(if $(NAME),$(wildcard $(OF)))

# Modules go to the workers in the folders' order, the longest first. By their
# number of tests, which is xdist's, long ones that have few would come last, to
# one worker. Nobody installs or builds meanwhile: the tests read both.
ifdef NAME
test: $(VENV)/test.stamp
	$(if $(FOUND),,$(error nothing is named $(NAME): take a room, a page \
	  or a lab, such as NAME=accumulation or NAME=03a_another_gradient))
	$(ALONE) $(PY) -m pytest --numprocesses auto --dist loadscope --nbval $(FOUND)
else
test: $(VENV)/test.stamp book lint  ## run every test, or one subject's (NAME=)
	@$(PY) tools/browser.py
	$(ALONE) $(PY) -m pytest --numprocesses auto --dist loadscope \
	  --no-loadscope-reorder --nbval labs chapters tests
endif

lab: $(VENV)/test.stamp  ## open the notebooks in JupyterLab
	$(VENV)/bin/jupyter lab

notebooks: $(VENV)/test.stamp  ## execute notebooks in place (NB=one.ipynb)
	$(ALONE) $(PY) tools/notebooks.py $(NB)

translations: $(VENV)/book.stamp  ## update what is to be put into Chinese
	$(ALONE) $(PY) tools/translations.py update

pictures: $(VENV)/test.stamp book  ## what widgets draw at first, the front page
	$(PY) tools/pictures.py
	$(PY) tools/front.py

measure: $(VENV)/test.stamp  ## run the experiments (SIZE=tiny OUT=folder)
	$(PY) -m membudget_experiments run --size $(SIZE) --out $(OUT)

peers: $(VENV)/home  ## run other memory calculators (downloads them)
	$(PY) tools/peers.py

zoo: $(VENV)/test.stamp  ## run other people's models, and record what held
	$(PY) tools/zoo.py --write

operators: $(VENV)/test.stamp  ## run PyTorch's operators beside the allocator
	$(PY) tools/operators.py --write

bench: $(VENV)/test.stamp book  ## measure the budgets: speed and sizes
	$(PY) tools/bench.py

soak: $(VENV)/test.stamp book  ## other processors, kills, every case of a test
	$(PY) tools/soak.py
	$(PY) tools/zoo.py
	$(PY) tools/operators.py
	SOAK=1 $(PY) -m pytest --numprocesses auto --dist loadscope tests

mutate: $(VENV)/test.stamp  ## plant faults: do tests notice? (N=150 SEED=0)
	$(PY) tools/mutate.py $(FILE) -n $(N) --seed $(SEED) $(if $(AGAIN),--again)

matrix:  ## rooms and notebooks on other versions (TORCH= PYTHON= COLAB=1)
	"$(or $(PYTHON),python3)" tools/matrix.py --torch $(or $(TORCH),2.15.0) \
	  $(if $(COLAB),--colab) $(TESTS)

lint: $(VENV)/test.stamp  ## check the style and the types of the code
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# What a requirements file pins, it pins alone. torch stays out: its version
# carries a local tag (+cpu, +cu128), and a CUDA build brings its own packages.
constraints: $(VENV)/test.stamp  ## write constraints.txt from .venv
	{ echo '# Versions of what the requirements pull in. `make constraints`.'; \
	  $(PY) -m pip freeze --exclude-editable | grep == \
	  | grep -vixF -f requirements.txt -f book/requirements.txt \
	  | grep -vE '^(torch|nvidia|cuda|triton)'; } > constraints.txt

clean:  ## delete what was built (not .venv)
	rm -rf _build .pytest_cache .ruff_cache .mypy_cache .hypothesis

# The set-up. A stamp says which requirements are in .venv already, and
# .venv/home where .venv was made: one that was moved, or never done, is made
# anew. Of several makes at once one installs and the others wait.
$(VENV)/home: FORCE
	@sh tools/venv.sh $(VENV) $(if $(PYTHON),"$(PYTHON)")

$(VENV)/book.stamp: book/requirements.txt constraints.txt $(VENV)/home
	$(PIP) -r book/requirements.txt
	@touch $@

$(VENV)/test.stamp: requirements.txt pyproject.toml \
  experiments/pyproject.toml $(VENV)/book.stamp
	$(PIP) -r requirements.txt
	$(PIP) --no-deps --no-build-isolation --editable . \
	  --editable experiments
	@touch $@
