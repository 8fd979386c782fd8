#!/usr/bin/env bash
# Run the fast tests; --all adds the slow ones, --gpu runs those that need an NVIDIA GPU (one is enough). Other arguments go to pytest, for instance: scripts/test.sh -k ring -x
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh

arguments=()
which="not slow"
for argument in "$@"; do
    case $argument in
        --all) which="" ;;
        --gpu) which="gpu" ;;
        -h | --help) sed -n '2p' scripts/test.sh | cut -c3-; exit 0 ;;
        *) arguments+=("$argument") ;;
    esac
done
# The tests fork several ranks: one thread each.
export OMP_NUM_THREADS=1
exec .venv/bin/python -m pytest ${which:+-m "$which"} "${arguments[@]}"
