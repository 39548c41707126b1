#!/usr/bin/env bash
# Prepares what `make` runs in. Two layers:
#
#   environment   the locked packages, in a virtual environment outside the clone. Its name holds the Python
#                 version and a hash of the lock files, so all clones with the same locks share one.
#   build/site    this clone's own wheel (Python package and cpu_worker), unpacked. Used by PYTHONPATH.
#
#   scripts/setup.sh path    prints the environment's folder; nothing where no Python fits
#   scripts/setup.sh venv    makes the environment if it is not there
#   scripts/setup.sh site    the same, then builds and unpacks the wheel if a source changed
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
  printf 'setup: %s\n' "$@" >&2
  exit 1
}

# The first Python 3.11 or 3.12 that starts.
find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.12 python3.11}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
}

# What an environment is made for: Python version and lock files.
venv_tag() {
  echo "$("$python" -c 'import platform; print(platform.python_version())')-$(cat requirements*.lock | sha256sum | cut -c1-12)"
}

need_python() {
  [ -n "$python" ] || fail "no Python 3.11 or 3.12 found (looked for: ${PYTHON:-python3 python3.12 python3.11})" \
    "on Debian or Ubuntu: apt-get install python3 python3-venv; elsewhere: make PYTHON=/path/to/python3.12"
  "$python" -c 'import ensurepip, venv' 2>/dev/null || fail "$python cannot make virtual environments" \
    "on Debian or Ubuntu: apt-get install python3-venv"
}

need_compiler() {
  [ -n "$(command -v "${CXX:-c++}" || command -v g++ || command -v clang++)" ] ||
    fail "no C++ compiler found; on Debian or Ubuntu: apt-get install g++"
}

install_locked() {
  local uv
  uv=$(grep -o '^uv==[0-9.]*' requirements-dev.lock)
  if "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$uv"; then
    "$venv/bin/uv" pip install --quiet --compile-bytecode --python "$venv/bin/python" -r requirements.lock -r requirements-dev.lock
  else
    "$venv/bin/python" -m pip install --disable-pip-version-check -r requirements.lock -r requirements-dev.lock
  fi
}

make_venv() {
  need_python
  mkdir -p "$(dirname "$venv")"
  exec 8>"$venv.lock"
  flock 8
  if [ "$(cat "$venv/.ready" 2>/dev/null)" != "$tag" ]; then
    echo "setup: installing the locked packages (about 9 GB) into $venv" >&2
    "$python" -m venv "$venv"
    install_locked || fail "the packages could not be installed; run the same command again to go on"
    echo "$tag" >"$venv/.ready"
  fi
  exec 8>&-
}

source_hash() {
  {
    echo "$venv"
    find python cpu_worker pyproject.toml LICENSE README.md -type f ! -path '*/__pycache__/*' -print0 |
      LC_ALL=C sort -z | xargs -0 sha256sum
  } | sha256sum
}

make_site() {
  local hash
  mkdir -p build
  exec 9>build/.lock
  flock 9
  hash=$(source_hash)
  if [ "$hash" != "$(cat build/site/.stamp 2>/dev/null)" ]; then
    need_compiler
    rm -rf build/site.new
    PATH="$venv/bin:$PATH" "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps \
      --no-build-isolation --no-index --target build/site.new . || fail "the wheel could not be built"
    echo "$hash" >build/site.new/.stamp
    rm -rf build/site
    mv build/site.new build/site
  fi
  exec 9>&-
}

python=$(find_python)
tag= venv=
if [ -n "$python" ]; then
  tag=$(venv_tag)
  venv=${SGLANG_FT_VENV:-${XDG_CACHE_HOME:-$HOME/.cache}/sglang-ft/venv-$tag}
fi
case ${1:-} in
  path) echo "$venv" ;;
  venv) make_venv ;;
  site) make_venv && make_site ;;
  *) fail "usage: scripts/setup.sh path|venv|site" ;;
esac
