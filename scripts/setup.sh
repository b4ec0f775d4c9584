#!/bin/bash
# Makes .venv with what `make demo` and `make test` need; `bench` adds the peers that benchmarks compare with, in .bench/.
# Usage: scripts/setup.sh test|bench. Does nothing when it is done and pyproject.toml has not changed since.
set -euo pipefail
cd "$(dirname "$0")/.."

TORCH_CPU="torch==2.13.0" # for machines without an NVIDIA GPU; pinned here only

what="$1"
python="${PYTHON:-python3}"
venv=.venv
log="$venv/setup.log"
stamp="$venv/.installed-$what-$(cat pyproject.toml scripts/setup.sh | sha256sum | cut -c1-16)"
[ -e "$stamp" ] && exit 0

step() { echo "setup: $*"; }

# Runs pip; its many lines go to a log, which is shown when it fails.
pip_install() {
    if ! "$venv/bin/python" -m pip install --disable-pip-version-check --no-input "$@" >>"$log" 2>&1; then
        tail -n 40 "$log" >&2
        echo "setup: pip install $* failed; the whole log is in $log" >&2
        exit 1
    fi
}

if [ "$what" = bench ]; then
    scripts/setup.sh test
    step "installing the peers of the benchmarks into .bench/"
    # Without their dependencies: these would bring a CUDA build of torch. What they really import is named here.
    pip_install --no-deps --upgrade --target .bench mosaicml-streaming==0.13.0 megatron-core==0.16.1 \
        Brotli python-snappy cramjam 'zstd<2' catalogue pillow
    pip_install --no-deps --upgrade --target .bench/speculators speculators==0.9.0 \
        openai hs-connectors loguru pydantic-settings
    rm -f "$venv"/.installed-bench-*
    touch "$stamp"
    exit 0
fi

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "setup: Python 3.11 or newer is needed, $python is $("$python" -V 2>&1). Set PYTHON=/path/to/python3.11." >&2
    exit 1
fi

if [ ! -x "$venv/bin/python" ]; then
    step "making $venv with $("$python" -V)"
    "$python" -m venv "$venv" || {
        echo "setup: venv failed; on Debian and Ubuntu: apt-get install python3-venv" >&2
        exit 1
    }
fi

start=$SECONDS
if [ -e /dev/nvidia0 ] || command -v nvidia-smi >/dev/null; then
    step "found an NVIDIA GPU: torch comes with the project, in its default build"
else
    step "no NVIDIA GPU found: installing the CPU build, $TORCH_CPU"
    pip_install "$TORCH_CPU"
fi
step "installing the project and what it needs (a few minutes; pip writes to $log)"
pip_install -e ".[test]"
rm -f "$venv"/.installed-test-*
touch "$stamp"
step "done in $((SECONDS - start)) s"
