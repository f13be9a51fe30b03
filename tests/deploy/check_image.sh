#!/bin/bash
# Builds the CPU image, states its size, runs the demo in it, and removes everything again. Needs root, podman, buildah
# and debootstrap, but neither a registry of images nor a kernel that lets containers have namespaces of their own:
# the base image is made from Debian's packages, and build and demo run in a chroot.
#
#   tests/deploy/check_image.sh [BUILD OPTION...]
#
# PIP_CONF: a pip.conf for the build and for the demo, which fetches the default model; it must lead to a CPU build of
# torch. BUILD OPTIONS go to `podman build` and to the demo, such as --volume=/my/wheels:/my/wheels:ro.
# KEEP=1 leaves the image in $WORK, which is a new folder under /var/tmp unless it is given.
set -euo pipefail

SOURCE="$(cd "$(dirname "$0")/../.." && pwd)"
WORK="${WORK:-$(mktemp -d /var/tmp/baton-image.XXXXXX)}"
mkdir -p "$WORK"
IMAGE=localhost/baton:cpu
BASE=localhost/debian:bookworm-slim
STORE=(--root "$WORK/storage" --runroot "$WORK/run" --storage-driver "${STORAGE_DRIVER:-overlay}")
OPTIONS=("$@")
[ -z "${PIP_CONF:-}" ] || OPTIONS+=("--volume=$PIP_CONF:/etc/pip.conf:ro")

clean_up() {
    [ -z "${KEEP:-}" ] || { echo "kept: $WORK"; return; }
    buildah "${STORE[@]}" rm --all >/dev/null 2>&1 || true
    podman "${STORE[@]}" system reset --force >/dev/null 2>&1 || true
    rm -rf --one-file-system "$WORK"
}
trap clean_up EXIT

if ! podman "${STORE[@]}" image exists "$BASE"; then
    echo "== the base image, from Debian's packages"
    debootstrap --variant=minbase bookworm "$WORK/base" >"$WORK/debootstrap.log"
    rm -rf "$WORK"/base/var/cache/apt/archives/*.deb "$WORK"/base/var/lib/apt/lists/*
    tar -C "$WORK/base" -c . | podman "${STORE[@]}" import --quiet - "$BASE"
    rm -rf "$WORK/base"
fi

echo "== the image"
podman "${STORE[@]}" build --isolation=chroot --pull=never --from "$BASE" "${OPTIONS[@]}" \
    -f "$SOURCE/deploy/Containerfile" -t "$IMAGE" "$SOURCE"
podman "${STORE[@]}" image ls --filter "reference=$IMAGE" --format 'size of the image: {{.Size}}'

echo "== the demo, as the image's user"
CONTAINER="$(buildah "${STORE[@]}" from --pull-never "$IMAGE")"
run() { buildah "${STORE[@]}" run --isolation=chroot "${OPTIONS[@]}" "$CONTAINER" -- "$@"; }
run id
run python -m cluster.cli.demo

echo "== what the manifests run in the pods"
OPTIONS+=("--volume=$SOURCE/tests/deploy:/checks:ro" "--volume=$SOURCE/deploy/kubernetes/manifests:/manifests:ro")
run python /checks/head_command.py /manifests/cpu.yaml
