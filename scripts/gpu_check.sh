#!/usr/bin/env bash
# What needs a CUDA device, in one go: the tests marked `gpu`, then the benchmark.
# usage: scripts/gpu_check.sh [OUTPUT_DIR]   needs torch with CUDA in the python3 on PATH
set -euo pipefail
cd "$(dirname "$0")/.."
out="${1:-gpu-check}"
mkdir -p "$out"
python3 -m pip install -q -c <(grep -v '^torch==' constraints.txt) -e '.[dev]'
python3 -m pytest -q -m gpu tests/gpu | tee "$out/tests.txt"
python3 -m tests.benchmarks.bench --quick --json "$out/bench.json" | tee "$out/bench.txt"
