#!/usr/bin/env bash
# Installs Apptainer on a Debian 12 or 13 test machine, as root, without touching the system's libc.
#
# Debian has the package only in sid, built for a newer libc than Debian 12's. So sid's packages are unpacked into a
# private prefix, and the two programs are pointed at the loader and the libraries found there. Apptainer looks for its
# configuration and its helpers relative to where it lies, hence the copies under /usr and /etc.
# On a cluster, ask for the admin's module or use the distribution's package instead: see README, "Apptainer".
set -euo pipefail

prefix=${PREFIX:-/opt/apptainer}
want="apptainer libc6 libseccomp2 libsqlite3-0"

if command -v apptainer >/dev/null && apptainer --version; then
  exit 0
fi
((EUID == 0)) || { echo "install_apptainer.sh: run it as root" >&2; exit 2; }
command -v apt-get >/dev/null || { echo "install_apptainer.sh: for Debian only; elsewhere see the README" >&2; exit 2; }

# The mirror this machine already uses, in either of apt's two formats.
mirror() {
  cat /etc/apt/sources.list.d/*.sources /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null |
    awk '/^URIs:/ {print $2; exit} $1 == "deb" {for (i = 2; i <= NF; i++) if ($i ~ /^[a-z+]+:/) {print $i; exit}}'
}

export DEBIAN_FRONTEND=noninteractive
apt-get update -q
apt-get install -y -q --no-install-recommends \
  patchelf squashfs-tools squashfuse fuse-overlayfs fuse2fs uidmap mmdebstrap

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/debs"
echo "deb $(mirror) sid main" >"$work/sources.list"
sid() {
  apt-get -q -o Dir::Etc::sourcelist="$work/sources.list" -o Dir::Etc::sourceparts=/dev/null \
    -o Dir::State::Lists="$work/lists" -o Dir::Cache="$work/cache" -o APT::Sandbox::User=root "$@"
}
sid update
# shellcheck disable=SC2086 - a list of words
(cd "$work/debs" && sid download $(printf '%s/sid ' $want))

mkdir -p "$prefix"
for package in "$work"/debs/*.deb; do dpkg -x "$package" "$prefix"; done
multiarch=$(dpkg --print-architecture | sed 's/amd64/x86_64-linux-gnu/; s/arm64/aarch64-linux-gnu/')
libraries=$prefix/usr/lib/$multiarch
loader=$(find "$prefix/usr" -name 'ld-linux*' -type f -print -quit)
patchelf --force-rpath --set-rpath "$libraries" "$(readlink -f "$libraries/libsqlite3.so.0")"
for program in "$prefix/usr/bin/apptainer" "$libraries/apptainer/bin/starter"; do
  patchelf --set-interpreter "$loader" --force-rpath --set-rpath "$libraries" "$program"
done

mkdir -p "/usr/lib/$multiarch/apptainer" /var/lib/apptainer/mnt/session
cp -a "$libraries/apptainer/." "/usr/lib/$multiarch/apptainer/"
cp -a "$prefix/etc/apptainer" /etc/
cp -a "$prefix/usr/bin/apptainer" /usr/bin/apptainer

# --fakeroot maps a range of ids; ordinary users mount a .sif through FUSE, whose device most distributions leave open.
for table in /etc/subuid /etc/subgid; do
  grep -q '^root:' "$table" 2>/dev/null || echo 'root:200000:65536' >>"$table"
done
[[ -e /dev/fuse ]] && chmod 0666 /dev/fuse
apptainer --version
