#!/usr/bin/env bash
# The GPU column of the engine's table, in under ten minutes, on a bare CUDA machine without a network:
# Python 3.12, torch 2.11, transformers 5.17, triton 3.6, numpy, pyyaml and pydantic; rich where it is there.
#
#   benchmarks/gpu.sh                          writes $OUT/engine_race_gpu.json, or benchmarks/results/ without OUT
#   benchmarks/gpu.sh --device cpu --quick     checks the script on any machine; all options of engine_race.py work
#
# Packages that are missing are taken from wheels in $WHEELS (.whl by default), unpacked beside the tree: nothing is
# installed. See README.md for what to put there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
wheels=${WHEELS:-.whl}
out=${OUT:-benchmarks/results}
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
mkdir -p "$out"

export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$site/inductor}

if ! "$python" -c 'import pydantic, llguidance' 2>/dev/null; then
  if compgen -G "$wheels/*.whl" >/dev/null; then
    for wheel in "$wheels"/*.whl; do "$python" -m zipfile -e "$wheel" "$site"; done
    export PYTHONPATH=$PYTHONPATH:$site
  fi
fi
"$python" - <<'CHECK'
import importlib
import sys

missing = []
for name in ("numpy", "yaml", "pydantic", "llguidance", "torch", "transformers", "warmkv.replicas.engine.engine"):
    try:
        importlib.import_module(name)
    except ImportError as error:
        missing.append(f"{name}: {error}")
if missing:
    sys.exit("gpu.sh: cannot import\n  " + "\n  ".join(missing) + "\nput wheels of what is missing into $WHEELS (.whl)")
CHECK

status=0
timeout "${LIMIT:-585}" "$python" -m benchmarks.engine_race --device cuda --minutes 8.5 \
  --json "$out/engine_race_gpu.json" "$@" || status=$?
case $status in
  0) echo "gpu.sh: done" ;;
  1) echo "gpu.sh: some targets are not met, or a race broke off; see the table" ;;
  124) echo "gpu.sh: stopped at its limit; the JSON holds the races that were done" ;;
esac
exit "$status"
