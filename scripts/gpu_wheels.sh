#!/usr/bin/env bash
# The Python packages that scripts/gpu_check.sh needs and a machine with torch and transformers may lack, as wheels for
# Linux x86-64 in .whl/ (0.3 MB): run it where pip works, then take the folder along. PYTHON_VERSION: of that machine.
set -euo pipefail
cd "$(dirname "$0")/.."
platforms=()
for name in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux1; do
    platforms+=(--platform "${name}_x86_64")
done
rm -rf .whl
"${PYTHON:-python3}" -m pip --disable-pip-version-check download --quiet --no-deps --only-binary=:all: \
    --python-version "${PYTHON_VERSION:-3.12}" --implementation cp "${platforms[@]}" --dest .whl \
    'msgspec>=0.18' "$@"
ls -l .whl
