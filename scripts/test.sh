#!/usr/bin/env bash
# Run the fast tests. --all adds the slow tests. --gpu sets up Transformer Engine and runs the tests that need an NVIDIA
# GPU (one is enough). Other arguments go to pytest, for instance: scripts/test.sh -k ring -x, or -n 0 to use no workers.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
case " $* " in *" -h "* | *" --help "*) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' scripts/test.sh; exit 0 ;; esac

arguments=()
which="not slow"
gpu=""
# Tests of a file share results, so each file runs on one worker. Ranks wait for each other a lot: two workers on two
# cores take about two thirds of one worker's time. tests/conftest.py defines the order.
workers=(-n logical --maxprocesses 8 --dist loadfile --no-loadscope-reorder)
for argument in "$@"; do
    case $argument in
        --all) which="" ;;
        --gpu) which="gpu" workers=() gpu=yes ;; # one GPU, one at a time
        *) arguments+=("$argument") ;;
    esac
done
scripts/setup.sh ${gpu:+--gpu}
# Without byte code every worker, and every process of a test, would compile all tests again, for ten seconds.
unset PYTHONDONTWRITEBYTECODE
# The tests fork several ranks: one thread each.
export OMP_NUM_THREADS=1
# The other tests run without a GPU, also on a machine that has one.
[[ $gpu ]] || export CUDA_VISIBLE_DEVICES=""
exec .venv/bin/python -m pytest ${which:+-m "$which"} "${workers[@]}" "${arguments[@]}"
