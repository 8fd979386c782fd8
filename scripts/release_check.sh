#!/usr/bin/env bash
# Check a release from this clone: the changelog entry, the documentation, sdist and wheel, and commands and a training
# run from the wheel in a fresh environment. Takes minutes, and 5 GB in TMPDIR unless that is on the disk of uv's cache.
#
#   scripts/release_check.sh [FOLDER]     # FOLDER: keep sdist and wheel there
#
# Run scripts/setup.sh first. The exit code is 0 if everything holds, 1 with a message otherwise.
set -euo pipefail
case " $* " in *" -h "* | *" --help "*) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}" && exit 0 ;; esac
kept=${1:+$(realpath -m "$1")}
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."

fail() { echo "release_check: $*" >&2 && exit 1; }
step() { echo "== $*"; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' megatron_cp/__init__.py)
step "changelog of $version"
grep -qE "^## \[${version//./\\.}\] - [0-9]{4}-[0-9]{2}-[0-9]{2}$" CHANGELOG.md ||
    fail "CHANGELOG.md: no entry for version $version. Fix: add '## [$version] - $(date +%F)' below '## [Unreleased]'"

python=$PWD/.venv/bin/python
uv=$(command -v uv || echo .venv/bin/uv)
[[ -x $python ]] || fail ".venv: not there. Fix: scripts/setup.sh"
if [[ -f mkdocs.yml ]]; then
    step "documentation"
    # Not --quiet: it hides warnings from --strict too.
    "$python" -m mkdocs build --strict --site-dir "$work/site" >"$work/log" 2>&1 ||
        { cat "$work/log" && fail "mkdocs.yml: the documentation has errors"; }
fi

step "sdist, and the wheel from it"
mkdir "$work/source" "$work/dist"
git ls-files -z | xargs -0 cp --parents -t "$work/source" # a build writes to its folder
(cd "$work/source" && "$python" -c 'import sys, setuptools.build_meta as build; build.build_sdist(sys.argv[1])' \
    "$work/dist") >"$work/log" 2>&1 || { cat "$work/log" && fail "pyproject.toml: no sdist could be built"; }
"$python" -m pip wheel -q --no-deps --no-index --no-build-isolation -w "$work/dist" "$work"/dist/*.tar.gz ||
    fail "pyproject.toml: no wheel could be built from the sdist"
[[ -f $work/dist/megatron_cp-$version.tar.gz ]] || fail "pyproject.toml: the sdist has another version than $version"

step "install into a fresh environment"
"$python" -m venv --without-pip "$work/fresh"
grep -oE '^[^ ]+==[^ ;]+' requirements.lock >"$work/versions.txt" # without hashes: the wheel has none
install() { "$@" --constraint "$work/versions.txt" --quiet "$work"/dist/*.whl; }
install "$uv" pip install --python "$work/fresh/bin/python" ||
    install "$python" -m pip --python "$work/fresh/bin/python" install || fail "the wheel could not be installed"

step "commands from the wheel"
mkdir "$work/empty" && cd "$work/empty"
export PATH=$work/fresh/bin:/usr/bin:/bin OMP_NUM_THREADS=1
unset PYTHONPATH
run() { # a command that must end with 0
    megatron-cp "$@" >"$work/log" 2>&1 || { cat "$work/log" && fail "megatron-cp $*: exit code other than 0"; }
}
small=(train.train_iters=2 train.global_batch_size=2 train.micro_batch_size=1 model.num_layers=1 dataset.seq_length=64
    scheduler.lr_warmup_iters=0 validation.eval_iters=1)
for command in $(megatron-cp --help | sed -n 's/^  \([a-z]\+\) .*/\1/p'); do
    run "$command" --help
done
run recipes
run validate llama31_405b_pretrain_config --environment gpu
for _ in {1..500}; do echo "some text"; done >text.txt
run preprocess --input text.txt --output-prefix corpus --tokenizer-type ByteLevelTokenizer
run train llama_tiny_p2p_pretrain_config -n 2 model.context_parallel_size=2 checkpoint.save=run "${small[@]}"
[[ -d run/iter_0000002 ]] || fail "megatron-cp train: no checkpoint was saved"
run evaluate run -n 2 validation.eval_iters=1
run report run

if [[ $kept ]]; then
    mkdir -p "$kept" && cp "$work"/dist/* "$kept"
fi
step "megatron-cp $version can be released"
