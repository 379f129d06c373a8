# SPDX-License-Identifier: Apache-2.0
# Second script of the machine: a network device, soft-RoCE on it, then the command; its status goes to the report port.
mount -t tmpfs run /run
mkdir -p /dev/shm /dev/pts
mount -t tmpfs shm /dev/shm
mount -t devpts pts /dev/pts
mount -t tmpfs tmp /var/tmp
/bin/busybox stty -F /dev/ttyS1 raw
number=$(sed -n 's/.*rig_number=\([0-9]*\).*/\1/p' /proc/cmdline)
ip link set lo up
if [ -e /sys/class/net/eth0 ]; then device=eth0; else device=dummy0; fi
[ -e /sys/class/net/$device ] || ip link add $device type dummy
ip addr add "10.9.0.$number/24" dev $device
ip link set $device up
rdma link add rxe0 type rxe netdev $device
echo "rig: up after $(cut -d' ' -f1 /proc/uptime) s, $(rdma link show)"
exec 3>/dev/ttyS1
bash /.rig/command.sh
printf '\n@status=%d\n' $? >&3
echo "rig: off after $(cut -d' ' -f1 /proc/uptime) s"
sync
/bin/busybox poweroff -f
