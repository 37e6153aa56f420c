#!/usr/bin/env bash
# Benchmarks of the search and of the simulator.
set -euo pipefail
cd "$(dirname "$0")/.."
for benchmark in search simulator; do
    echo "+ benchmarks/$benchmark.py"
    .venv/bin/python "benchmarks/$benchmark.py"
done
