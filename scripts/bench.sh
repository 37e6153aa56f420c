#!/usr/bin/env bash
# Benchmarks. The search is compared with torch, which nothing else here needs.
set -euo pipefail
cd "$(dirname "$0")/.."
.venv/bin/python -c 'import torch' 2>/dev/null ||
    .venv/bin/python -m pip install --quiet --constraint constraints.txt torch
for benchmark in search simulator; do
    echo "+ benchmarks/$benchmark.py"
    .venv/bin/python "benchmarks/$benchmark.py"
done
