#!/usr/bin/env bash
# Installs the servers and tools that the storage tests run against (`make test-servers`), each in the version named here.
#
#   install-servers.sh [NAME...]   by default all but minio and otelcol (a collector of OpenTelemetry), which are built for minutes:
#                              versitygw s3proxy azurite hadoop mfusepy glusterfs launchers (Slurm and Open MPI)
#                              metrics (ClickHouse and Prometheus) chromium
#
#   SERVERS_DIR  where (default: ~/.cache/bytecheckpoint-servers). What is there in the right version stays as it is.
#
# Needs go, npm and mvn with a JDK, and the registries that they are set up for. Nothing is installed outside SERVERS_DIR,
# but for GlusterFS, FUSE's library, Slurm, MPI, ClickHouse and Prometheus: Debian packages, which take root. Where that cannot be, their tests are skipped.
set -euo pipefail

DIR=${SERVERS_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/bytecheckpoint-servers}
VERSITYGW=github.com/versity/versitygw/cmd/versitygw@v1.8.0
MINIO=github.com/minio/minio@v0.0.0-20260212201848-7aac2a2c5b7c # AGPL: a tool for tests, not a part of the package; builds for minutes
S3PROXY=org.gaul:s3proxy:2.9.0
AZURITE=azurite@3.35.0
HADOOP=3.4.2
MFUSEPY=mfusepy==3.1.1
OTELCOL=v0.165.0 # of OpenTelemetry's collector, built from its own receiver and its exporter to the log

say() { echo "install-servers: $*" >&2; }

need() {
    command -v "$1" >/dev/null || {
        say "$2 needs $1, which is not on PATH"
        exit 1
    }
}

# fresh NAME VERSION: true, with an empty folder $DIR/NAME, when it is not there in this version.
fresh() {
    [[ -f $DIR/$1/.version && $(<"$DIR/$1/.version") == "$2" ]] && return 1
    say "installing $1 ($2)"
    rm -rf "${DIR:?}/$1"
    mkdir -p "$DIR/$1"
}

done_with() { echo "$2" >"$DIR/$1/.version"; }

# go_tool NAME PACKAGE: builds PACKAGE into $DIR/NAME/NAME. The tools share Go's caches, which are large and removed at the end.
go_work=""
trap '[[ -z $go_work ]] || rm -rf "$go_work"' EXIT
go_tool() {
    fresh "$1" "$2" || return 0
    need go "$1"
    [[ -n $go_work ]] || go_work=$(mktemp -d "$DIR/build-XXXXXX")
    GOPATH=$go_work/path GOCACHE=$go_work/cache GOBIN=$go_work/bin GOFLAGS="-buildvcs=false -modcacherw" go install "$2"
    mv "$go_work"/bin/* "$DIR/$1/$1"
    done_with "$1" "$2"
}

versitygw() { go_tool versitygw "$VERSITYGW"; }
minio() { go_tool minio "$MINIO"; }

# maven NAME VERSION GROUP:ARTIFACT:VERSION...: puts Java libraries, with all that they need, into $DIR/NAME/lib.
maven() {
    fresh "$1" "$2" || return 0
    need mvn "$1"
    need java "$1"
    local name=$1 wanted=$2 library group artifact version
    {
        echo "<project><modelVersion>4.0.0</modelVersion><groupId>tests</groupId><artifactId>$name</artifactId>"
        echo "<version>1</version><dependencies>"
        for library in "${@:3}"; do
            IFS=: read -r group artifact version <<<"$library"
            echo "<dependency><groupId>$group</groupId><artifactId>$artifact</artifactId><version>$version</version></dependency>"
        done
        echo "</dependencies></project>"
    } >"$DIR/$name/pom.xml"
    (cd "$DIR/$name" && mvn -q dependency:copy-dependencies -DincludeScope=runtime -DoutputDirectory=lib)
    done_with "$name" "$wanted"
}

s3proxy() { maven s3proxy "$S3PROXY" "$S3PROXY"; }

hadoop() {
    local of=org.apache.hadoop
    maven hadoop "$HADOOP" "$of:hadoop-hdfs:$HADOOP" "$of:hadoop-common:$HADOOP" "$of:hadoop-hdfs-client:$HADOOP"
}

azurite() {
    fresh azurite "$AZURITE" || return 0
    need npm azurite
    need node azurite
    (cd "$DIR/azurite" && npm install --no-save --no-audit --no-fund --loglevel=error "$AZURITE")
    done_with azurite "$AZURITE"
}

mfusepy() {
    fresh mfusepy "$MFUSEPY" || return 0
    if command -v "${UV:-uv}" >/dev/null; then
        "${UV:-uv}" pip install --quiet --python "${VENV:-.venv}/bin/python" --target "$DIR/mfusepy" "$MFUSEPY"
    else
        need python3 mfusepy
        python3 -m pip install --quiet --target "$DIR/mfusepy" "$MFUSEPY"
    fi
    done_with mfusepy "$MFUSEPY"
}

glusterfs() {
    type -P glusterfs >/dev/null && type -P glusterfsd >/dev/null && type -P fusermount3 >/dev/null && return 0
    if [[ $EUID -ne 0 || ! -e /dev/fuse ]] || ! command -v apt-get >/dev/null; then
        say "SKIPPED: glusterfs, which takes root, /dev/fuse and apt-get; its tests will be skipped, and say so"
        return 0
    fi
    say "installing glusterfs and fuse3 (Debian packages)"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        glusterfs-server glusterfs-client fuse3 >/dev/null
}

launchers() {
    type -P slurmctld >/dev/null && type -P slurmd >/dev/null && type -P srun >/dev/null && type -P mpirun >/dev/null && return 0
    if [[ $EUID -ne 0 ]] || ! command -v apt-get >/dev/null; then
        say "SKIPPED: slurm and mpi, which take root and apt-get; their tests will be skipped, and say so"
        return 0
    fi
    say "installing slurm and openmpi (Debian packages)"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        slurmctld slurmd slurm-client openmpi-bin >/dev/null
}

metrics() {
    type -P clickhouse-server >/dev/null && type -P prometheus >/dev/null && return 0
    if [[ $EUID -ne 0 ]] || ! command -v apt-get >/dev/null; then
        say "SKIPPED: clickhouse and prometheus, which take root and apt-get; their tests will be skipped, and say so"
        return 0
    fi
    say "installing clickhouse-server and prometheus (Debian packages)"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends clickhouse-server prometheus >/dev/null
}

otelcol() {
    fresh otelcol "$OTELCOL" || return 0
    need go otelcol
    local of=go.opentelemetry.io/collector
    [[ -n $go_work ]] || go_work=$(mktemp -d "$DIR/build-XXXXXX")
    printf 'dist: {name: otelcol, output_path: %s}\nreceivers: [{gomod: %s}]\nexporters: [{gomod: %s}]\n' "$go_work/otelcol" \
        "$of/receiver/otlpreceiver $OTELCOL" "$of/exporter/debugexporter $OTELCOL" >"$go_work/otelcol.yaml"
    (
        export GOPATH=$go_work/path GOCACHE=$go_work/cache GOBIN=$go_work/bin GOFLAGS="-buildvcs=false -modcacherw"
        go install "$of/cmd/builder@$OTELCOL"
        "$GOBIN/builder" --config "$go_work/otelcol.yaml" >/dev/null
    )
    mv "$go_work/otelcol/otelcol" "$DIR/otelcol/otelcol"
    done_with otelcol "$OTELCOL"
}

chromium() {
    type -P chromium >/dev/null && return 0
    if [[ $EUID -ne 0 ]] || ! command -v apt-get >/dev/null; then
        say "SKIPPED: chromium, which takes root and apt-get; its tests will be skipped, and say so"
        return 0
    fi
    say "installing chromium (Debian package)"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null
}

mkdir -p "$DIR"
names=("$@")
[[ ${#names[@]} -gt 0 ]] || names=(versitygw s3proxy azurite hadoop mfusepy glusterfs launchers metrics chromium)
for name in "${names[@]}"; do
    case $name in
    versitygw | minio | s3proxy | azurite | hadoop | mfusepy | glusterfs | launchers | metrics | otelcol | chromium) "$name" ;;
    *)
        say "no server is called $name: versitygw, minio, s3proxy, azurite,, hadoop, mfusepy, glusterfs, launchers, metrics, otelcol, chromium"
        exit 1
        ;;
    esac
done
say "all there in $DIR"
