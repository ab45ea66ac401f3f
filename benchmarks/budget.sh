#!/usr/bin/env bash
# Runs a command that may have so much memory and no more, else it is killed with code 137: needs root and cgroups, version 1.
#   benchmarks/budget.sh 2200M COMMAND...
# With version 2: systemd-run --scope -p MemoryMax=2200M -p MemorySwapMax=0 COMMAND...
set -euo pipefail
[ $# -ge 2 ] || { echo "usage: $0 BYTES COMMAND..." >&2; exit 2; }
group=/sys/fs/cgroup/memory/tfdist$$
trap 'rmdir "$group"' EXIT
mkdir "$group"
echo "$1" > "$group/memory.limit_in_bytes"
swap=$group/memory.memsw.limit_in_bytes
[ ! -e "$swap" ] || echo "$1" > "$swap"
shift
(echo "$BASHPID" > "$group/cgroup.procs" && exec "$@")
