#!/bin/bash
# hosts.t: two hosts. Each is a network namespace with a name of its own; a pair of virtual interfaces
# connects them, and mpirun reaches them by an agent that enters them. Traffic between hosts goes over TCP,
# traffic within one through shared memory. Groups within hosts and across them, against one device. TAP.
# Skipped if there are no namespaces.
# needs: build/01_data_parallel/ddp_bucketed build/01_data_parallel/collectives build/02_zero/zero3
# needs: build/03_tensor_parallel/sequence_parallel build/03_tensor_parallel/async_tensor_parallel
. "$(dirname "$0")/tap.sh"
export OMP_NUM_THREADS=1
if ! command -v ip >/dev/null || ! unshare -m --propagation private true 2>/dev/null; then
    echo "1..0 # SKIP ip (iproute2) is not installed, or there are no namespaces here"
    exit 0
fi
id=us$$ net=10.$((RANDOM % 100 + 100)).$((RANDOM % 250))
leave() {
    for i in 1 2; do ip netns pids $id-$i | xargs -r kill -9; ip netns del $id-$i; done 2>/dev/null
    rm -rf "$work"
}
trap leave EXIT
ip netns add $id-1 2>"$err" && ip netns add $id-2 && ip link add name cable netns $id-1 type veth peer \
    name cable netns $id-2 || {
    echo "1..0 # SKIP no network namespaces here: $(head -n 1 "$err")"
    exit 0
}
for i in 1 2; do
    ip -n $id-$i addr add $net.$i/24 dev cable && ip -n $id-$i link set cable up &&
        ip -n $id-$i link set lo up
    mkdir -p "$work/etc" && echo "$net.$i host$i" >>"$work/hosts"
done

# The agent that mpirun calls like ssh: AGENT HOST COMMAND…. The other host's name, and the same list of
# hosts.
cat >"$work/agent" <<AGENT
#!/bin/bash
host=\$1 && shift
exec ip netns exec $id-\${host#host} unshare -u -m --propagation private bash -c '
    hostname \$0 && mount --bind $work/hosts /etc/hosts && mount -t tmpfs none /dev/shm && exec bash -c "\$*"' \$host "\$@"
AGENT
chmod +x "$work/agent"

# on_hosts PROGRAM FLAGS…: two ranks on each of them.
settings="--mca plm_rsh_agent $work/agent --mca btl self,vader,tcp --mca mpi_yield_when_idle 1"
settings+=" --mca btl_tcp_if_include $net.0/24 --mca oob_tcp_if_include $net.0/24"
on_hosts() {
    local program=$1
    shift
    run "$work/agent" host1 "cd ${PWD@Q} && OMPI_MCA_orte_execute_quiet=1 mpirun \
        --allow-run-as-root --oversubscribe --bind-to none $settings -H host1:$each,host2:$each \
        -n $((2 * each)) $by $as ${PWD@Q}/$build/$program $*"
}
each=2 as='' by=''
crosses() {  # crosses NAME PROGRAM FLAGS…
    local name=$1
    shift
    wanted "$name" || return
    on_hosts "$@" && grep -q "^PASS ${1##*/}: " "$out"
    report $? "$name"
}

crosses "collectives" 01_data_parallel/collectives
crosses "gradients are summed across" 01_data_parallel/ddp_bucketed --steps 2
crosses "weights are gathered across" 02_zero/zero3 --steps 2
crosses "tensor parallelism within, ZeRO-2 across" 03_tensor_parallel/sequence_parallel --tp 2 --dp 2 \
    --zero 2 --steps 2
crosses "rows in flight across" 03_tensor_parallel/async_tensor_parallel --steps 2
by='--map-by node'
crosses "ranks that alternate between hosts" 01_data_parallel/ddp_bucketed --steps 2
wanted "ranks that alternate between hosts: the hosts" &&
    grep -qE '^4 ranks on 2 hosts: host1 \(2\), host2 \(2\)' "$out"
report $? "ranks that alternate between hosts: the hosts"
by=''
if [ "$only" = '*' ]; then
    sent=$(ip -n $id-1 -s link show cable | awk '/TX:/ { getline; print $1 }')
    [ "$sent" -gt 1000000 ]
    report $? "and it did cross: $sent bytes"
fi

# Two machines with the same name: they booted at different times, and a process of one has a number that no
# process of the other has. The namespace that numbers their processes has on both the name that it has on any
# kernel.
mkdir "$work/spaces" && ln -s 'pid:[4026531836]' "$work/spaces/pid"
cat >"$work/machine" <<MACHINE
#!/bin/bash
cat /proc/sys/kernel/random/uuid >$work/started\$\$
mount --bind $work/started\$\$ /proc/sys/kernel/random/boot_id
exec unshare -u -p -f bash -c 'hostname twin
    for ((i = 0; i < 10 * OMPI_COMM_WORLD_RANK; i++)); do /bin/true; done
    (read -r number rest </proc/self/stat && mount --bind $work/spaces /proc/\$number/ns && exec "\$@")
    exit' twin "\$@"
MACHINE
chmod +x "$work/machine"
as=$work/machine each=1
crosses "two machines of one name" 01_data_parallel/ddp_bucketed --steps 2
as='' each=2

# With the link down, ranks say what they wait for, and end. mpirun then waits for its daemon on the other
# host, half a minute or more; none of its settings was found to shorten that (oob_tcp_keepalive_* do not),
# so the test ends it.
if wanted "the link goes down"; then
    on_hosts 02_zero/zero3 --no-check --steps 1000000 --eval-every 0 --sample 0 --timeout 2 &
    running=$!
    for i in $(seq 200); do grep -q 'matrix multiply' "$out" && break; sleep 0.1; done
    sleep 1
    ip -n $id-1 link set cable down
    for i in $(seq 300); do grep -q ', for .* s (--timeout)$' "$err" && break; sleep 0.1; done
    ip netns pids $id-1 | xargs -r kill -9 2>/dev/null
    wait $running
    ! grep -q '^PASS' "$out" && grep -qE \
        'rank [01]: .*waits in .*, for (data|rank [23](, 3)?), for .* s \(--timeout\)$' "$err"
    report $? "the link goes down: $(tail -n 1 "$err" | cut -c1-150)"
fi
finish
