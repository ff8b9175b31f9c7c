#!/bin/sh
# Makes sure that a program is there: need.sh PROGRAM DEBIAN-PACKAGE WHY
# Installs the package where that is possible without asking (as root, or with sudo); otherwise says what to do.
set -eu
program=$1 package=$2 why=$3

command -v "$program" >/dev/null 2>&1 && exit 0

if [ "$(id -u)" = 0 ]; then
    as_root=
elif command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then
    as_root=sudo
else
    as_root=none
fi
if [ "$as_root" = none ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "$program is not installed ($why); install it with your system's package manager (Debian, Ubuntu: $package), then run this again." >&2
    exit 1
fi

echo "==> Installing $package from the system's packages ($why)"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
export DEBIAN_FRONTEND=noninteractive
if ! { $as_root apt-get update -q && $as_root apt-get install -q -y --no-install-recommends "$package"; } >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    echo "$package could not be installed; apt's own words are above." >&2
    exit 1
fi
