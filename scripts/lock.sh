#!/usr/bin/env bash
# Pin the newest versions that pyproject.toml allows, with hashes, in requirements.lock. Run it after changing
# dependencies. The file names no package index: each machine installs from the one it is configured with.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The PyTorch release is chosen, not the newest: the one that the GPU machines' drivers run.
echo "torch==2.11.0" >"${TMPDIR:-/tmp}/megatron-cp-constraints-$$"
trap 'rm -f "${TMPDIR:-/tmp}/megatron-cp-constraints-$$"' EXIT
uv pip compile pyproject.toml --extra dev --constraint "${TMPDIR:-/tmp}/megatron-cp-constraints-$$" \
    --universal --python-version 3.12 --generate-hashes --no-emit-index-url --no-annotate \
    --custom-compile-command scripts/lock.sh --quiet --output-file requirements.lock "$@"
