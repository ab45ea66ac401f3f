#!/usr/bin/env bash
# Runs a command in a network namespace whose loopback is as slow as a network: needs root, iproute2 and the kernel's tbf.
#   benchmarks/slow_link.sh 100mbit COMMAND...      (or 1gbit, ...)
set -euo pipefail
[ $# -ge 2 ] || { echo "usage: $0 RATE COMMAND..." >&2; exit 2; }
export SLOW_LINK=$1
shift
namespace=tfdist$$
trap 'ip netns pids "$namespace" | xargs -r kill; ip netns del "$namespace"' EXIT
ip netns add "$namespace"
ip -n "$namespace" link set lo up
ip netns exec "$namespace" tc qdisc add dev lo root tbf rate "$SLOW_LINK" burst 512kb latency 50ms
ip netns exec "$namespace" "$@"
