#!/usr/bin/env bash
# Install the packages of requirements.lock into .venv. --gpu adds Transformer Engine, --mamba the kernels of mamba-ssm;
# later calls keep them. quickstart.sh and test.sh call this script first. It returns at once if .venv is up to date. It
# may be interrupted, and two calls may run at once.
set -euo pipefail
extras=() # optional dependencies of pyproject.toml that are compiled here
for argument in "$@"; do
    case $argument in
        --gpu | --mamba) extras+=("${argument#--}") ;;
        -h | --help) sed -n '2,4p' "${BASH_SOURCE[0]}" | cut -c3- && exit 0 ;;
        *) echo "setup: no option $argument; there are --gpu and --mamba" >&2 && exit 2 ;;
    esac
done
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."

stamp=.venv/.megatron-cp-setup           # checksum of what was installed; written last
place=.venv/.megatron-cp-place           # path of this clone: scripts in a virtual environment hold absolute paths
unfinished=.venv/.megatron-cp-unfinished # exists while packages are being installed
compiled=.venv/.megatron-cp-             # followed by the extra's name: its version and the PyTorch it was compiled for

te=tests/doubles/te_on_cpu/requirements.txt       # packages for tests, installed into .venv/te
mamba=tests/doubles/mamba_on_cpu/requirements.txt # packages for tests, installed into .venv/mamba

wanted=$({ echo "$PWD"; cat requirements.lock pyproject.toml "$te" "$mamba" scripts/setup.sh; } | sha256sum)

for extra in gpu mamba; do
    [[ " ${extras[*]} " == *" $extra "* || ! -f $compiled$extra ]] || extras+=("$extra")
done

# compiled_as EXTRA: print the versions that the extra is compiled for.
compiled_as() { grep --no-filename -e '^torch==' -e "^$1 = " requirements.lock pyproject.toml; }
is_compiled() { [[ -f $compiled$1 && $(<"$compiled$1") == "$(compiled_as "$1")" ]]; }
base_is_current() { [[ -x .venv/bin/python && -f $stamp && $(<"$stamp") == "$wanted" ]]; }
to_compile() {
    local extra
    for extra in "${extras[@]}"; do
        is_compiled "$extra" || echo "$extra"
    done
}
is_current() { base_is_current && [[ -z $(to_compile) ]]; }

# is_right_python COMMAND: whether it runs (a pyenv shim may not) and requirements.lock has wheels for its version.
is_right_python() {
    "$1" -c 'import sys; sys.exit(not (3, 12) <= sys.version_info < (3, 15))' >/dev/null 2>&1
}

find_python() {
    local candidate
    local candidates=(python3.12)
    if command -v uv >/dev/null && candidate=$(uv python find 3.12 --no-project --no-python-downloads 2>/dev/null); then
        candidates+=("$candidate")
    fi
    candidates+=("${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python3.12 /usr/bin/python3.12 /usr/local/bin/python3.12)
    candidates+=(python3 /usr/bin/python3 python3.13 python3.14 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[34]*/bin/python3)
    for candidate in "${candidates[@]}"; do
        if is_right_python "$candidate"; then
            # The interpreter itself, not a shim that asks the current folder which one it is.
            "$candidate" -c 'import sys; print(sys._base_executable)'
            return
        fi
    done
    echo "setup: no Python 3.12, 3.13 or 3.14 found (looked on PATH, for uv's and for pyenv's). Install one, for" \
        "instance with 'uv python install 3.12', 'pyenv install 3.12' or your system's packages, and run this again." >&2
    return 1
}

# find_uv PYTHON: print a uv that runs. If there is none, install it into .venv.
find_uv() {
    local candidate
    for candidate in uv .venv/bin/uv .venv/uv/bin/uv; do
        if "$candidate" --version >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    if .venv/bin/python -m pip --version >/dev/null 2>&1; then
        .venv/bin/python -m pip install -qq uv >&2 && echo .venv/bin/uv
    else # no ensurepip (Debian without python3-venv): use the pip of that Python
        "$1" -m pip install -qq --target .venv/uv uv >&2 && echo .venv/uv/bin/uv
    fi
}

pip_setting() { "$1" -m pip config list 2>/dev/null | sed -n "s/^global\\.$2='\\(.*\\)'\$/\\1/p" || true; }

# follow_pip_configuration PYTHON: pass pip's index and certificates to uv, which does not read pip's settings.
follow_pip_configuration() {
    local index=${PIP_INDEX_URL:-$(pip_setting "$1" index-url)} certificates=${PIP_CERT:-$(pip_setting "$1" cert)}
    if [[ -n $index && -z ${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-} ]]; then
        export UV_DEFAULT_INDEX=$index
    fi
    if [[ -n $certificates && -z ${SSL_CERT_FILE:-} ]]; then
        export SSL_CERT_FILE=$certificates
    fi
    export UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-180}
}

# install_for_tests COMMAND...: install what tests need, with this command.
install_for_tests() {
    "$@" --target .venv/te --upgrade --no-deps --require-hashes --quiet --requirement "$te" ||
        echo "setup: tests with Transformer Engine's Python part will be skipped: it could not be installed" >&2
    # Source packages: only their Python is installed, nothing is compiled. Without FORCE_BUILD they would download a
    # package with compiled kernels. Without --no-cache-dir a later set-up for a GPU would get this package.
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

# Set the array pip to .venv's pip, or to another Python's pip that installs into .venv.
find_pip() {
    pip=(.venv/bin/python -m pip)
    "${pip[@]}" --version >/dev/null 2>&1 || pip=("$python" -m pip --python .venv/bin/python)
}

# Slower than uv, but it reads all of pip's settings on this machine.
install_with_pip() {
    local pip
    find_pip
    "${pip[@]}" install --require-hashes --requirement requirements.lock &&
        "${pip[@]}" install --no-deps --no-build-isolation --quiet --editable . || return
    install_for_tests "${pip[@]}" install
}

# Print PyTorch's version of CUDA, for instance 13.0, or None.
cuda_of_pytorch() { .venv/bin/python -c 'import torch; print(torch.version.cuda)'; }

# can_compile EXTRA: whether it can be compiled here; print what is missing.
can_compile() {
    local extra=$1 headers cuda can=yes
    cuda=$(cuda_of_pytorch)
    [[ $cuda == 13.* ]] || { can="" && echo "setup: --$extra needs a PyTorch for CUDA 13, not for $cuda" >&2; }
    headers=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("include"))')
    command -v "${CXX:-c++}" >/dev/null || { can="" && echo "setup: no C++ compiler (${CXX:-c++}): install g++" >&2; }
    [[ -f $headers/Python.h ]] || { can="" && echo "setup: no $headers/Python.h: install python3-dev" >&2; }
    [[ $can ]]
}

# Packages published as source work only with the PyTorch they were compiled for. An isolated build would compile for the
# newest PyTorch. Without FORCE_BUILD a package may download what others have compiled. A cached build may be for another
# PyTorch. No CUDA toolkit is needed: PyTorch's packages have the libraries and most headers, and the index has the rest
# and the compiler. Transformer Engine's expert parallelism (NCCL_EP) needs a newer NCCL.
# fetch_to_compile COMMAND...: install the compiler and headers, with this command.
fetch_to_compile() {
    "$@" --quiet ninja wheel &&
        "$@" --target .venv/cuda --upgrade --no-deps --quiet \
            nvidia-{cuda-nvcc,cuda-crt,cuda-cccl,nvvm}"==$(cuda_of_pytorch).*"
}

# Print the number of compile jobs: one per core, with 8 GiB each for its four compilers.
jobs_that_fit() {
    local fit cores
    fit=$(awk '/MemAvailable/ { print int($2 / 8388608) }' /proc/meminfo)
    cores=$(nproc)
    echo $((fit < 1 ? 1 : fit < cores ? fit : cores))
}

# compile EXTRA COMMAND...: compile and install the extra, with this command.
compile() {
    local extra=$1 cuda=$PWD/.venv/cuda/nvidia/cu13 pinned=.venv/cuda/pinned.txt libraries
    shift
    grep -oE '^[^ ]+==[^ ]+' requirements.lock >"$pinned" # with hashes pip would require them of all packages
    libraries=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia/cu13
    mkdir -p "$cuda/lib"
    ln -sf "$libraries/lib/libcudart.so.13" "$cuda/lib/libcudart.so" # the linker looks for this name
    PATH=$PWD/.venv/bin:$PATH CUDA_HOME=$cuda CPATH=$cuda/include:$libraries/include${CPATH:+:$CPATH} \
        LIBRARY_PATH=$cuda/lib${LIBRARY_PATH:+:$LIBRARY_PATH} MAX_JOBS=${MAX_JOBS:-$(jobs_that_fit)} \
        NVTE_FRAMEWORK=pytorch NVTE_PYTORCH_FORCE_BUILD=TRUE NVTE_BUILD_USE_NVIDIA_WHEELS=1 NVTE_WITH_NCCL_EP=0 \
        UV_CONCURRENT_BUILDS=1 MAMBA_FORCE_BUILD=${MAMBA_FORCE_BUILD:-TRUE} CAUSAL_CONV1D_FORCE_BUILD=${MAMBA_FORCE_BUILD:-TRUE} \
        "$@" --no-build-isolation --no-cache-dir --constraint "$pinned" --editable ".[$extra]"
}

install_base() {
    touch "$unfinished"
    echo "setup: installing the $(grep -c '==' requirements.lock) pinned packages of requirements.lock" >&2
    if ! install_with_uv; then
        echo "setup: uv could not do it (see above); trying pip" >&2
        if ! install_with_pip; then
            echo "setup: the packages could not be installed; the messages above say why." >&2
            exit 1
        fi
    fi
    # Compile to byte code what commands and ranks import. Otherwise four ranks do it at the same time. Where Python may
    # not write byte code, they do it at each start (6 s of CPU time a rank).
    local packages
    packages=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    .venv/bin/python -m compileall -q "$packages"/{antlr4,hydra,omegaconf,yaml} || true
    env -u PYTHONDONTWRITEBYTECODE .venv/bin/python -c 'import megatron_cp.training.train, megatron_cp.quickstart
import matplotlib.pyplot, torch._dynamo, torch.distributed.run, torch.utils.tensorboard, transformers.models.auto' \
        >/dev/null 2>&1 || true
    pwd >"$place"
    rm "$unfinished"
    printf '%s\n' "$wanted" >"$stamp"
}

# add EXTRA: compile and install it.
add() {
    local uv pip
    can_compile "$1" || return
    find_pip
    case $1 in
        gpu) echo "setup: compiling Transformer Engine for this PyTorch, some minutes" >&2 ;;
        mamba) echo "setup: compiling mamba-ssm for this PyTorch and all kinds of GPUs, some two hours of one core" >&2 ;;
    esac
    if uv=$(find_uv "$python") && fetch_to_compile "$uv" pip install --python .venv/bin/python; then
        compile "$1" "$uv" pip install --python .venv/bin/python
    else
        fetch_to_compile "${pip[@]}" install && compile "$1" "${pip[@]}" install
    fi
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
else
    echo "setup: flock is not installed (Debian: util-linux). Do not set up this folder twice at once." >&2
fi

# Delete .venv if an installation was interrupted (a package may be incomplete), if it was moved (its scripts hold the
# old path), or if an extra was compiled for another PyTorch.
stale=""
for extra in $(to_compile); do
    [[ ! -f $compiled$extra ]] || stale=yes
done
if [[ -e $unfinished || ( -f $place && $(<"$place") != "$PWD" ) || $stale ]]; then
    rm -rf .venv
fi
python=$(find_python)
if ! is_right_python .venv/bin/python; then
    rm -rf .venv
    echo "setup: making .venv with $("$python" --version) ($python)" >&2
    "$python" -m venv .venv >/dev/null 2>&1 || "$python" -m venv --clear --without-pip .venv
fi
follow_pip_configuration "$python"
if ! base_is_current; then
    install_base
fi
for extra in $(to_compile); do
    if ! add "$extra"; then
        echo "setup: --$extra failed (see above). Everything else is installed, and training works without it." >&2
        exit 1
    fi
    rm -rf .venv/cuda
    compiled_as "$extra" >"$compiled$extra"
done
