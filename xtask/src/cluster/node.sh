# Becomes the process that keeps a node's namespaces alive, and does nothing else.
# Arguments: the node's folder, its name, the cluster's folders (kept visible), a file to create when ready, then one
# `mount options` pair for each cgroup hierarchy. Runs inside new mount, UTS and cgroup namespaces.
set -e
folder=$1 name=$2 base=$3 ready=$4
shift 4
echo "$name" > /proc/sys/kernel/hostname

# Copies of the host's mounts would keep their file systems and namespaces in use. The last mount is removed first.
tac /proc/self/mountinfo | while read -r _ _ _ _ at rest; do
    case "$at,${rest#* - }" in
    /,*) ;;
    /run,* | /run/* | /sys,* | /sys/* | *,nsfs\ * | *,overlay\ * | *,bpf\ *) umount -l "$at" || true ;;
    esac
done

# Data that outlives restarts of the node is on disk. The rest of /var/lib is the host's and hidden.
mkdir -p "$folder/var-lib${base#/var/lib}" "$folder/var-lib/kubelet" "$folder/var-lib/containerd" "$folder/var-lib/cni" \
    "$folder/var-log/pods" "$folder/var-log/containers"
mount --rbind "$base" "$folder/var-lib${base#/var/lib}"
mount --rbind "$folder/var-lib" /var/lib
mount --bind "$folder/var-log" /var/log

# As after a boot: nothing in /run, this namespace's devices in /sys, an empty BPF file system.
mount -t tmpfs -o mode=755 run /run
mount -t sysfs sysfs /sys
while [ $# -gt 0 ]; do
    case $1 in
    tmpfs) mount -t tmpfs -o mode=755 cgroup /sys/fs/cgroup ;;
    *)
        mkdir -p "$1"
        if [ "$2" = v2 ]; then mount -t cgroup2 cgroup2 "$1"; else mount -t cgroup -o "$2" cgroup "$1"; fi
        ;;
    esac
    shift 2
done
mount -t bpf -o mode=755 bpf /sys/fs/bpf

# The kubelet requires these settings, which apply to the whole machine. It reads files with the required values.
mkdir -p /run/sysctl
while read -r setting value; do
    [ -e "/proc/sys/$setting" ] || continue
    file=/run/sysctl/$(echo "$setting" | tr / .)
    echo "$value" > "$file"
    mount --bind "$file" "/proc/sys/$setting"
done << END
vm/overcommit_memory 1
vm/panic_on_oom 0
kernel/panic 10
kernel/panic_on_oops 1
kernel/keys/root_maxkeys 1000000
kernel/keys/root_maxbytes 25000000
END

# Pods may request mount propagation in both directions.
mount --make-rshared /
touch "$ready"
exec sleep infinity
