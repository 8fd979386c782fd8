#!/usr/bin/env bash
# Run the checks that need a GPU, one after the other: the installation, four ranks on one GPU, the tests for
# GPUs and the benchmarks. Each has a log and a time limit. A failed check does not stop the others. One GPU is enough.
#
#   scripts/gpu_checks.sh [--out FOLDER] [--seconds N] [CHECK ...]
#
# CHECK     look, verify, train, tests, pretrain, attention, rates, profile or larger; default: all, in this order
# --out     folder of logs and traces (default: runs/gpu_checks of this clone)
# --seconds time limit of all checks together: the running check is stopped, and the rest is left out
#
# PYTHON is the interpreter (default: .venv/bin/python, which scripts/setup.sh --gpu creates). The script installs nothing
# and needs no network. WORKERS is the number of tests that run at a time (6). Exit code 1: a check failed or was left out.
set -uo pipefail
from=$PWD
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."

checks=(look verify train tests pretrain attention rates profile larger)
out=$PWD/runs/gpu_checks seconds=0 chosen=()
refuse() { echo "gpu_checks: $*; see scripts/gpu_checks.sh --help" >&2 && exit 2; }
while (($#)); do
    case $1 in
        -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' scripts/gpu_checks.sh && exit 0 ;;
        --out | --seconds)
            (($# > 1)) || refuse "$1 needs a value"
            case $1$2 in --out/*) out=$2 ;; --out*) out=$from/$2 ;; *) seconds=$2 ;; esac
            shift
            ;;
        *) [[ " ${checks[*]} " == *" $1 "* ]] && chosen+=("$1") || refuse "no option or check $1" ;;
    esac
    shift
done
[[ $seconds =~ ^[0-9]+$ ]] || refuse "--seconds $seconds must be a whole number"
((${#chosen[@]})) || chosen=("${checks[@]}")
mkdir -p "$out" || exit 2
python=${PYTHON:-.venv/bin/python}
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
# Benchmarks: long sequences fragment memory, and Transformer Engine's slow attention must not be measured.
measured=(env PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True NVTE_UNFUSED_ATTN=0 "$python")
ranks=("$python" -m torch.distributed.run --nproc_per_node=4)
tiny=(--recipe llama_tiny_pretrain_config dist.distributed_backend=staged)
bf16=(mixed_precision.fp32=false mixed_precision.bf16=true)

summary=() failed=0 running=
trap '[[ $running ]] && kill -INT "$running"; exit 130' INT TERM
# check NAME SECONDS COMMAND...: run the command for at most SECONDS, or for the rest of the total time.
check() {
    local name=$1 limit=$2 began=$SECONDS code
    shift 2
    [[ " ${chosen[*]} " == *" $name "* ]] || return 0
    if ((seconds && seconds - SECONDS < limit)); then limit=$((seconds - SECONDS)); fi
    if ((limit < 5)); then
        summary+=("$name: no time left") && failed=1
        return 0
    fi
    echo "== $name: $*"
    # timeout ends the command and its children, which are a process group of their own. An interrupt from the keyboard
    # does not reach that group, so this script passes it on.
    exec 3> >(tee -i "$out/$name.log")
    tee=$!
    timeout --signal=INT --kill-after=10 "$limit" "$@" >&3 2>&1 &
    running=$!
    exec 3>&-
    wait "$running"
    code=$?
    kill -KILL -- "-$running" 2>/dev/null # leftover processes would disturb the next check
    wait "$tee"
    ((code == 0)) || failed=1
    case $code in 0) code=passed ;; 124 | 137) code="stopped after $limit s" ;; *) code="failed ($code)" ;; esac
    summary+=("$name: $code, $((SECONDS - began)) s: $(grep -v '^ *$' "$out/$name.log" | tail -n 1 | cut -c-120)")
}

check look 120 "$python" -m megatron_cp doctor --try
check verify 300 "${ranks[@]}" -m megatron_cp verify "${tiny[@]}"
check train 300 "${ranks[@]}" -m megatron_cp train "${tiny[@]}" "${bf16[@]}" train.train_iters=20 \
    checkpoint.save="$(mktemp -u "$out/train.XXXXXX")"
# Only the files that have such tests: importing all others would take every worker longer than the tests.
mapfile -t files < <(grep -rlw --include='test_*.py' 'mark\.gpu' tests)
check tests 900 "$python" -m pytest -vv -m gpu -n "${WORKERS:-6}" --dist load --no-loadscope-reorder "${files[@]}"
check pretrain 900 "${measured[@]}" benchmarks/gpu_pretrain.py --sizes 8192,32768 --recompute none --tokens 65536 \
    --warm-up 2 --steps 4
check attention 900 "${measured[@]}" benchmarks/gpu_attention.py --sizes 4096,16384,65536 --heads 32/8 --packs 8 --repeats 5
check rates 900 "${measured[@]}" benchmarks/device_rates.py --sizes 512,2048,8192,32768 --steps 3
check profile 300 "${measured[@]}" benchmarks/gpu_pretrain.py --sizes 8192,32768 --recompute none --attention te \
    --tokens 32768 --steps 2 --profile "$out/traces"
check larger 900 "${measured[@]}" benchmarks/gpu_pretrain.py --models 8b --sizes 8192,32768 --recompute none --tokens 65536 \
    --warm-up 2 --steps 3

printf '\n'
printf '== %s\n' "${summary[@]}"
exit $failed
