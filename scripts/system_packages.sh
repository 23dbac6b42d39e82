#!/bin/sh
# Installs the Debian packages that the tests drive: a browser, Node for the official JavaScript client, and what
# compiles and runs the kernels for ARM elsewhere.
set -eu

missing=""
command -v chromium > /dev/null || missing="$missing chromium"
command -v node > /dev/null || missing="$missing nodejs"
command -v npm > /dev/null || missing="$missing npm"
command -v aarch64-linux-gnu-g++ > /dev/null || missing="$missing g++-aarch64-linux-gnu"
command -v qemu-aarch64 > /dev/null || missing="$missing qemu-user"
[ -n "$missing" ] || exit 0

if ! command -v apt-get > /dev/null; then
  echo "the tests need these programs, and there is no apt-get to install them with:$missing" >&2
  exit 1
fi
root=""
[ "$(id -u)" = 0 ] || root="sudo"
echo "installing for the tests:$missing"
$root apt-get update -qq
# shellcheck disable=SC2086 # a list of words
DEBIAN_FRONTEND=noninteractive $root apt-get install -qq -y --no-install-recommends $missing > /dev/null
