#!/bin/busybox sh
# SPDX-License-Identifier: Apache-2.0
# First program of the machine: its root is the host's, read-only, under the unpacked packages and a writable layer.
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
for module in /modules/*.ko; do insmod "$module" || echo "rig: cannot load $module"; done
options=trans=virtio,version=9p2000.L,msize=512000,cache=loose,ro
mount -t 9p -o $options host /host
mount -t 9p -o $options tools /tools
mount -t tmpfs rw /rw
mkdir /rw/upper /rw/work
mount -t overlay -o lowerdir=/tools:/host,upperdir=/rw/upper,workdir=/rw/work over /newroot
for folder in dev proc sys; do mount --move /$folder /newroot/$folder; done
mkdir -p /newroot/.rig
cp /guest.sh /command.sh /newroot/.rig/
exec switch_root /newroot /bin/bash /.rig/guest.sh
