#!/bin/busybox sh
# The first process of a virtual machine. Its files are the host's, read only, below a layer in memory; then `job` runs.
# An error ends it: the kernel panics, the machine stops, and its console has the reason.
set -e
b=/bin/busybox
# RELEASE; MODULES and PROGRAM, which are the host's paths.
. /settings

$b mount -t proc proc /proc
$b mount -t sysfs sys /sys
$b mount -t devtmpfs dev /dev
for module in /modules/*; do
    $b insmod "$module"
done

$b mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=loose,ro host /host
$b mount -t tmpfs tmpfs /layer
$b mkdir /layer/upper /layer/work
$b mount -t overlay -o lowerdir=/host,upperdir=/layer/upper,workdir=/layer/work root /root

# Before 5.11 maps count against this limit, and the tests have no capability to raise it.
ulimit -l unlimited

cd /root
for folder in run tmp; do
    $b mount -t tmpfs tmpfs $folder
done
$b mount -t proc proc proc
$b mount -t sysfs sys sys
$b mount -t devtmpfs dev dev
$b mkdir -p dev/shm dev/pts
$b mount -t tmpfs tmpfs dev/shm
$b mount -t devpts devpts dev/pts
$b mount -t cgroup2 cgroup2 sys/fs/cgroup
$b mount -t bpf bpf sys/fs/bpf

# On the host, both may be in folders that the folders in memory now hide.
$b mkdir -p lib/modules/"$RELEASE" run/rouse
$b mount --bind /host"$MODULES" lib/modules/"$RELEASE"
$b touch run/rouse/tests
$b mount --bind /host"$PROGRAM" run/rouse/tests
$b cp /job run/rouse/job
exec $b switch_root /root /bin/sh /run/rouse/job
