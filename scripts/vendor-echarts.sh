#!/usr/bin/env bash
# Puts ECharts, which draws the charts of `bytecheckpoint report`, into the package: the minified file, as npm has it, with its license.
#
#   vendor-echarts.sh VERSION   npm checks the package against its registry's sum; echarts.json says what lies here
set -euo pipefail

version=${1:?"usage: vendor-echarts.sh VERSION"}
target=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/src/bytecheckpoint/monitoring/report/assets/echarts
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
npm pack --silent "echarts@$version" >/dev/null
tar xzf "echarts-$version.tgz"
mkdir -p "$target"
cp package/dist/echarts.min.js package/LICENSE package/NOTICE package/licenses/LICENSE-d3 "$target/"
chmod 644 "$target"/*
cat >"$target/echarts.json" <<END
{
  "version": "$version",
  "license": "Apache-2.0",
  "package": "sha512-$(openssl dgst -sha512 -binary "echarts-$version.tgz" | base64 -w0)",
  "echarts.min.js": "sha256-$(openssl dgst -sha256 -binary package/dist/echarts.min.js | base64 -w0)"
}
END
