#!/usr/bin/env bash
# Minutes of work: the tests marked long, then the core and the transfer engine between threads, and the tests of the core,
# under the address, undefined-behaviour and thread sanitizers.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"
dependencies=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
CXX=${CXX:-c++}

python -m pytest -m long

# The oldest transformers that is supported, in an environment of its own with everything else from .venv.
echo "+ realexec under transformers 5.17"
old=build/transformers-5.17
python -m venv --without-pip "$old"
echo "$dependencies" >"$("$old/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth"
old_pip() { pip --python "$old/bin/python" --disable-pip-version-check install --quiet --no-deps "$@"; }
old_pip --ignore-installed transformers==5.17.0 'huggingface_hub<2' httpx httpcore
old_pip --no-build-isolation --force-reinstall .
"$old/bin/python" -m pytest -q $(grep -lE '^from finemoe\.realexec|tiny_models' tests/test_*.py)

# An environment of its own per build: finemoe as a plain install, everything else from .venv.
build() { # FOLDER SANITIZERS
    echo "+ building for -fsanitize=$2 in $1"
    python -m venv --without-pip "$1/venv"
    echo "$dependencies" >"$("$1/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth"
    pip --python "$1/venv/bin/python" --disable-pip-version-check install --quiet --no-deps --no-build-isolation \
        --force-reinstall --config-settings build-dir="$1/cmake" --config-settings "cmake.define.FINEMOE_SANITIZE=$2" \
        --config-settings cmake.define.FINEMOE_STRESS=ON .
    "$1/cmake/core_stress"
    "$1/cmake/transfer_stress"
}

# The interpreter is not instrumented, so the run-time library comes first.
preload() { # FOLDER LIBRARY COMMAND...
    echo "+ ${*:3}"
    LD_PRELOAD="$("$CXX" -print-file-name="$2") $("$CXX" -print-file-name=libstdc++.so)" "$1/venv/bin/python" "${@:3}"
}

# Those that reach the core. A sanitizer keeps freed memory, so what a run leaves behind is not measured here.
core_tests=$(grep -lE '^from (transfer_case|finemoe(\.| import ).*(_core|policy\.core|contract|sim|replay|cli))' tests/test_*.py |
    grep -vE 'test_(docs|plugin_tutorial)')
unmeasured="not memory_is_bounded and not breaks_the_contract"
export ASAN_OPTIONS=detect_leaks=0 # the interpreter keeps what it has at exit
export TSAN_OPTIONS=suppressions=$PWD/tests/cpp/tsan.supp
build build/address address,undefined
preload build/address libasan.so -m pytest -q -m "not long" -k "$unmeasured" $core_tests
build build/thread thread
preload build/thread libtsan.so -m pytest -q -m "not long" -k "$unmeasured" $core_tests
