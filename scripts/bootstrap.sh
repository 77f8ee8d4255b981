#!/usr/bin/env bash
# Makes the development environment: a virtual environment with this package (editable) and its pinned dependencies.
#
#   VENV    where (default: .venv). An environment that is already there is kept and installed into.
#   PYTHON  the interpreter to build it from: a path, or a version such as 3.11, which is looked for on PATH and in pyenv
#           (default: the first of 3.12, 3.13, 3.11 that runs).
#   EXTRAS  which extras and dependency groups of pyproject.toml to install (default: all that `make test` and `make docs` need).
#   PINNED  a file of pinned requirements to install as well (default: none). Its versions go before those of constraints.txt.
#   UV      the uv to use (default: the one on PATH, else one is installed with pip under .cache/).
#
# Needs nothing but Python and an index to install from. Running it again does nothing, quickly, until pyproject.toml or
# constraints.txt changes.
set -euo pipefail
shopt -s inherit_errexit # a `die` inside $(...) ends the script
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=${VENV:-.venv}
EXTRAS=${EXTRAS:-cli,s3-profiles,fsspec,hdfs,orbax,prometheus,otlp,monitor,dev,docs,bench,demo}
PINNED=${PINNED:-}
export UV_PYTHON_DOWNLOADS=never
export UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-300} # torch is a large wheel

die() {
    echo "bootstrap: $*" >&2
    exit 1
}

# The real executable behind $1 if it runs and is new enough. (pyenv's shims are on PATH for every version that is
# installed, and fail for those that are not selected.)
usable_python() {
    "$1" -c 'import sys; sys.version_info >= (3, 11) or sys.exit(1); print(sys.executable)' 2>/dev/null
}

find_python() {
    local version candidate release versions="3.12 3.13 3.11"
    if [[ ${PYTHON:-} =~ ^[0-9]+\.[0-9]+$ ]]; then
        versions=$PYTHON
    elif [[ -n ${PYTHON:-} ]]; then
        usable_python "$PYTHON" || die "PYTHON=$PYTHON does not run, or is older than 3.11"
        return
    fi
    for version in $versions; do
        while read -r candidate; do
            usable_python "$candidate" && return
        done < <(type -aP "python$version" || true)
        if command -v pyenv >/dev/null; then
            while read -r release; do
                candidate=$(PYENV_VERSION=$release pyenv which python 2>/dev/null) || continue
                usable_python "$candidate" && return
            done < <(pyenv versions --bare 2>/dev/null | grep -E "^${version//./\\.}\.[0-9]+\$" | sort -rV || true)
        fi
    done
    [[ -n ${PYTHON:-} ]] && die "found no Python $PYTHON that runs and is 3.11 or newer"
    usable_python python3 && return
    die "found no Python 3.11 or newer; name one with PYTHON=/path/to/python"
}

# A uv that runs; without one, pip installs it under .cache/, into a small environment of its own or, where the
# interpreter has no venv module, into a plain folder (which a system's "externally managed" Python allows too).
find_uv() {
    local python candidate home=.cache/bootstrap
    for candidate in ${UV:+"$UV"} uv "$home/bin/uv"; do
        "$candidate" --version >/dev/null 2>&1 && echo "$candidate" && return
    done
    [[ -z ${UV:-} ]] || die "UV=$UV does not run"
    python=$(find_python)
    echo "bootstrap: installing uv" >&2
    if "$python" -m venv --clear "$home" >/dev/null 2>&1; then
        "$home/bin/python" -m pip install --quiet --constraint constraints.txt uv >&2
    else
        rm -rf "$home"
        "$python" -m pip install --quiet --target "$home" --constraint constraints.txt uv >&2 ||
            die "$python has no venv module, and its pip cannot install uv: install uv, or name it with UV=/path/to/uv"
    fi
    echo "$home/bin/uv"
}

# What the environment depends on. The path counts because the install is editable.
fingerprint() {
    { cat pyproject.toml constraints.txt ${PINNED:+"$PINNED"} && echo "$EXTRAS $PWD"; } | cksum
}

stamp=$VENV/.bytecheckpoint-stamp
wanted=$(fingerprint)
if [[ -f $stamp && $(<"$stamp") == "$wanted" && -x $VENV/bin/python ]]; then
    exit 0
fi

uv=$(find_uv)
if ! "$VENV/bin/python" -c '' 2>/dev/null; then
    python=$(find_python)
    echo "bootstrap: making $VENV with $("$python" -V) and $("$uv" --version)"
    # --clear only where an environment is there whose interpreter is gone.
    "$uv" venv --quiet --python "$python" $([[ -f $VENV/pyvenv.cfg ]] && echo --clear) "$VENV"
fi
constraints=$VENV/constraints.txt
awk -F'==' 'FILENAME == ARGV[1] { pinned[$1]; next } !($1 in pinned)' "${PINNED:-/dev/null}" constraints.txt >"$constraints"
groups=$(awk '/^\[/ { inside = $0 == "[dependency-groups]" } inside && /^[a-z-]+ = / { print $1 }' pyproject.toml)
extras="" wanted_groups=()
for name in ${EXTRAS//,/ }; do
    if grep -qxF -- "$name" <<<"$groups"; then wanted_groups+=(--group "$name"); else extras+=${extras:+,}$name; fi
done
"$uv" pip install --quiet --python "$VENV/bin/python" --constraint "$constraints" --build-constraint constraints.txt \
    --editable ".${extras:+[$extras]}" "${wanted_groups[@]}" ${PINNED:+-r "$PINNED"}
echo "$wanted" >"$stamp"
echo "bootstrap: $VENV is ready"
