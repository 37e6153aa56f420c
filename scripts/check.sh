#!/usr/bin/env bash
# Lint, format and types, of Python and C++. Runs everything, then fails if anything failed.
set -uo pipefail
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"
failed=0
run() {
    echo "+ $*"
    "$@" || failed=1
}

run ruff check --quiet --output-format concise .
run ruff format --quiet --check .
# mypy reads the sources through a link named as the package; an installed finemoe would pass unread.
mkdir -p build
ln -sfn .. build/finemoe
run mypy
run mypy tests benchmarks
echo "+ clang-format"
find csrc tests/cpp -name '*.[ch]pp' -exec clang-format --dry-run -Werror {} + || failed=1
exit $failed
