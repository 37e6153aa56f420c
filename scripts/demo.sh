#!/usr/bin/env bash
# The main job on the shipped sample: what three systems give, with a sixth and with half of the experts cached.
set -euo pipefail
cd "$(dirname "$0")/.."
set -- .venv/bin/finemoe-sim --trace traces/samples/azure_conv_synthetic.parquet --num-requests 32 \
    --policy lru,finemoe,oracle --expert-cache 16GB,48GB --output finemoe-results/demo
echo "$*"
exec "$@"
