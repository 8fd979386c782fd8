#!/usr/bin/env bash
# Make .venv as requirements.lock says. quickstart.sh and test.sh call this first; it returns at once when .venv is
# current. Safe to interrupt, and to run several times at once.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."

stamp=.venv/.megatron-cp-setup           # written last: what was installed
place=.venv/.megatron-cp-place           # where: scripts in a virtual environment hold absolute paths
unfinished=.venv/.megatron-cp-unfinished # there while packages are being unpacked

te=tests/te_on_cpu/requirements.txt      # for tests: into .venv/te
mamba=tests/mamba_on_cpu/requirements.txt # for tests: into .venv/mamba

wanted=$({ echo "$PWD"; cat requirements.lock pyproject.toml "$te" "$mamba" scripts/setup.sh; } | sha256sum)

is_current() { [[ -x .venv/bin/python && -f $stamp && $(<"$stamp") == "$wanted" ]]; }

is_right_python() { # 3.12 or newer; a pyenv shim can be there and still not run
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

find_python() {
    local candidate
    local candidates=(python3.12)
    if command -v uv >/dev/null && candidate=$(uv python find 3.12 --no-project --no-python-downloads 2>/dev/null); then
        candidates+=("$candidate")
    fi
    candidates+=("${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python3.12 /usr/bin/python3.12 /usr/local/bin/python3.12)
    candidates+=(python3 /usr/bin/python3 python3.13 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[3-9]*/bin/python3)
    for candidate in "${candidates[@]}"; do
        if is_right_python "$candidate"; then
            # The interpreter itself, not a shim that asks the current folder which one it is.
            "$candidate" -c 'import sys; print(sys._base_executable)'
            return
        fi
    done
    echo "setup: no Python 3.12 found (looked on PATH, for uv's and for pyenv's). Install one, for instance with" \
        "'uv python install 3.12', 'pyenv install 3.12' or your system's packages, and run this again." >&2
    return 1
}

find_uv() { # prints a uv that runs; installs it in .venv if there is none
    local candidate
    for candidate in uv .venv/bin/uv .venv/uv/bin/uv; do
        if "$candidate" --version >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    if .venv/bin/python -m pip --version >/dev/null 2>&1; then
        .venv/bin/python -m pip install -qq uv >&2 && echo .venv/bin/uv
    else # no ensurepip (Debian without python3-venv): a pip outside may still fill a folder
        "$1" -m pip install -qq --target .venv/uv uv >&2 && echo .venv/uv/bin/uv
    fi
}

pip_setting() { "$1" -m pip config list 2>/dev/null | sed -n "s/^global\\.$2='\\(.*\\)'\$/\\1/p" || true; }

follow_pip_configuration() { # uv does not read pip's settings: pass on which index and certificates to use
    local index=${PIP_INDEX_URL:-$(pip_setting "$1" index-url)} certificates=${PIP_CERT:-$(pip_setting "$1" cert)}
    if [[ -n $index && -z ${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-} ]]; then
        export UV_DEFAULT_INDEX=$index
    fi
    if [[ -n $certificates && -z ${SSL_CERT_FILE:-} ]]; then
        export SSL_CERT_FILE=$certificates
    fi
    export UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-180}
}

install_for_tests() { # with this command
    "$@" --target .venv/te --upgrade --no-deps --require-hashes --quiet --requirement "$te" ||
        echo "setup: tests with Transformer Engine's Python part will be skipped: it could not be installed" >&2
    # Source packages: their Python alone is packed, with what is installed already. Not forced, they would look elsewhere
    # for a package that somebody else has built; kept in a cache, it would be what a machine with a GPU gets, too.
    env {MAMBA,CAUSAL_CONV1D}_{SKIP_CUDA,FORCE}_BUILD=TRUE "$@" --target .venv/mamba --upgrade --no-deps \
        --no-build-isolation --no-cache-dir --require-hashes --quiet --requirement "$mamba" ||
        echo "setup: tests with mamba-ssm's kernels will be skipped: they could not be installed" >&2
}

install_with_uv() {
    local uv
    uv=$(find_uv "$python") && [[ -n $uv ]] &&
        "$uv" pip install --python .venv/bin/python --require-hashes --requirement requirements.lock &&
        "$uv" pip install --python .venv/bin/python --no-deps --no-build-isolation --quiet --editable . || return
    install_for_tests "$uv" pip install --python .venv/bin/python
}

install_with_pip() { # slower, but reads every setting that a machine's pip has
    local pip=(.venv/bin/python -m pip)
    "${pip[@]}" --version >/dev/null 2>&1 || pip=("$python" -m pip --python .venv/bin/python)
    "${pip[@]}" install --require-hashes --requirement requirements.lock &&
        "${pip[@]}" install --no-deps --no-build-isolation --quiet --editable . || return
    install_for_tests "${pip[@]}" install
}

if is_current; then
    exit 0
fi
if command -v flock >/dev/null; then
    exec 9>.setup.lock
    flock --nonblock 9 || { echo "setup: waiting for another set-up of this folder" >&2; flock 9; }
    if is_current; then
        exit 0
    fi
fi

# A half-unpacked package can look installed, and a moved .venv has wrong paths inside: start afresh.
if [[ -e $unfinished || ( -f $place && $(<"$place") != "$PWD" ) ]]; then
    rm -rf .venv
fi
python=$(find_python)
if ! is_right_python .venv/bin/python; then
    rm -rf .venv
    echo "setup: making .venv with $("$python" --version) ($python)" >&2
    "$python" -m venv .venv >/dev/null 2>&1 || "$python" -m venv --clear --without-pip .venv
fi
touch "$unfinished"
follow_pip_configuration "$python"

echo "setup: installing the $(grep -c '==' requirements.lock) pinned packages of requirements.lock" >&2
if ! install_with_uv; then
    echo "setup: uv could not do it (see above); trying pip" >&2
    if ! install_with_pip; then
        echo "setup: the packages could not be installed; the messages above say why." >&2
        exit 1
    fi
fi
# What commands and ranks import, compiled now: else four ranks would do it at the same time, and where Python may not
# write byte code, at each start again (6 s of CPU time a rank).
packages=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
.venv/bin/python -m compileall -q "$packages"/{antlr4,hydra,omegaconf,yaml} || true
env -u PYTHONDONTWRITEBYTECODE .venv/bin/python -c 'import megatron_cp.training.train, megatron_cp.quickstart
import matplotlib.pyplot, torch._dynamo, torch.distributed.run, torch.utils.tensorboard, transformers.models.auto' \
    >/dev/null 2>&1 || true
pwd >"$place"
rm "$unfinished"
printf '%s\n' "$wanted" >"$stamp"
