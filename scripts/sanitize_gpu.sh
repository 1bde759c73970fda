#!/usr/bin/env bash
# The GPU kernels, at tiny sizes, under compute-sanitizer: memcheck on all, racecheck (shared memory) on some.
# Usage: scripts/sanitize_gpu.sh [PYTHON]. Every tensor gets its own cudaMalloc, so that a step past its end is seen.
set -u
python="${1:-python3}"
limit_s="${SANITIZER_LIMIT_S:-120}" # of one family
cd "$(dirname "$0")/.."
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is missing: install the CUDA toolkit" >&2; exit 1; }

check() { # TOOL FAMILY
  local log status
  log="$(timeout "$limit_s" compute-sanitizer --tool "$1" --error-exitcode 9 --print-limit 5 \
    "$python" -m tests.kernels.triton_checks cuda "$2" 2>&1)"
  status=$?
  echo "$1 $2: exit $status; $(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' <<<"$log" | tail -1)"
  [ $status -eq 0 ] || { head -60 <<<"$log" >&2; return 1; }
}

failed=0
for family in decode prefill cascade between skinny sampling kv_pack hopper; do check memcheck "$family" || failed=1; done
for family in decode prefill between skinny sampling kv_pack; do check racecheck "$family" || failed=1; done
exit $failed
