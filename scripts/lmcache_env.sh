#!/usr/bin/env bash
# Makes .venv-lmcache: LMCache for CPU only, plus what akvcache needs, for tests/benchmarks/side_by_side.py.
# Idempotent: a second run with the same list does nothing. usage: scripts/lmcache_env.sh [FOLDER]
set -euo pipefail
cd "$(dirname "$0")/.."

venv="${1:-.venv-lmcache}"
torch="torch==2.13.0"
lmcache="lmcache==0.5.6"
# The dependencies LMCache imports on a CPU. Its own list wants CUDA packages, so it is installed without one.
needs=(
  "numpy<=2.2.6" aiofile aiofiles blake3 aiohttp awscrt cryptography fastapi httpx "huggingface_hub>=1.5" msgspec numba
  nvtx "opentelemetry-api<=1.40.0" opentelemetry-sdk opentelemetry-exporter-otlp
  "opentelemetry-exporter-prometheus<=0.61b0" "prometheus_client<=0.24.1" psutil py-cpuinfo pyyaml pyzmq "protobuf<7"
  redis hiredis safetensors sortedcontainers "transformers>=5.4" uvicorn httptools cachetools "grpcio>=1.78"
)
akvcache=(anyio xxhash typing-extensions)

stamp="$venv/.installed"
wanted="$(printf '%s\n' "$torch" "$lmcache" "${needs[@]}" "${akvcache[@]}")"
if [[ -f "$stamp" && "$(cat "$stamp")" == "$wanted" ]]; then
  echo "$venv is up to date"
  exit 0
fi

"${PYTHON:-python3}" -m venv "$venv"
pip=("$venv/bin/python" -m pip install --quiet)
"${pip[@]}" "$torch" "${needs[@]}" "${akvcache[@]}"
"${pip[@]}" --no-deps "$lmcache"
"$venv/bin/python" -c "import lmcache.v1.cache_engine, lmcache, torch; print('lmcache', lmcache.__version__ if hasattr(lmcache, '__version__') else '', 'torch', torch.__version__)"
printf '%s\n' "$wanted" > "$stamp"
