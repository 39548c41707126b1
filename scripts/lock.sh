#!/usr/bin/env bash
# Writes the lock files anew: the newest versions that pyproject.toml allows, for Python 3.11 and 3.12.
set -euo pipefail
cd "$(dirname "$0")/.."

compile() {
  uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --upgrade \
    --no-header --no-annotate --no-emit-index-url "$@"
}

compile pyproject.toml --output-file requirements.lock
compile --group dev --constraint requirements.lock --output-file requirements-dev.lock
