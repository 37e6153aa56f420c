#!/usr/bin/env bash
# The main job on the shipped sample: what three systems give, with a quarter and with four fifths of the experts
# cached, at a rate of arrivals that the slowest can follow.
set -euo pipefail
cd "$(dirname "$0")/.."
set -- .venv/bin/finemoe-sim --trace traces/samples/azure_conv_synthetic.parquet --num-requests 32 --rate 0.02 \
    --policy lru,finemoe,oracle --expert-cache 24GB,72GB --output finemoe-results/demo
echo "$*"
exec "$@"
