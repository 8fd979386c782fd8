#!/usr/bin/env bash
# Run the fast tests; --all adds the slow ones, --gpu sets up Transformer Engine and runs those that need an NVIDIA GPU (one is enough). Other arguments go to pytest, for instance: scripts/test.sh -k ring -x, or -n 0 for no workers beside it
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
case " $* " in *" -h "* | *" --help "*) sed -n '2p' scripts/test.sh | cut -c3-; exit 0 ;; esac

arguments=()
which="not slow"
gpu=""
# A file's tests share what they computed, so each file stays with one worker. Ranks wait for each other a lot: two
# workers on two cores take about two thirds of the time that one takes. The order is that of tests/conftest.py.
workers=(-n logical --maxprocesses 8 --dist loadfile --no-loadscope-reorder)
for argument in "$@"; do
    case $argument in
        --all) which="" ;;
        --gpu) which="gpu" workers=() gpu=yes ;; # one GPU, one at a time
        *) arguments+=("$argument") ;;
    esac
done
scripts/setup.sh ${gpu:+--gpu}
# Else every worker, and every process that a test starts, would compile all tests anew, for ten seconds.
unset PYTHONDONTWRITEBYTECODE
# The tests fork several ranks: one thread each.
export OMP_NUM_THREADS=1
# All others are of what runs without a GPU, also where there is one.
[[ $gpu ]] || export CUDA_VISIBLE_DEVICES=""
exec .venv/bin/python -m pytest ${which:+-m "$which"} "${workers[@]}" "${arguments[@]}"
