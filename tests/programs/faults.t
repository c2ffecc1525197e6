#!/bin/bash
# faults.t: a sample of the runs of `make faults`, in which ranks, launchers and disks fail. TAP.
# needs: build/01_data_parallel/ddp_bucketed build/08_mixed_precision/train_5d
. "$(dirname "$0")/tap.sh"
for seed in 1 2 3 4; do tests/faults 10 $seed >"$work/$seed" 2>&1 & running[seed]=$!; done
for seed in 1 2 3 4; do
    wait ${running[seed]}
    status=$?
    cp "$work/$seed" "$out"
    [ $status = 0 ] && grep -q '^10 faults from seed .*, 0 ended as they should not' "$out"
    report $? "10 faults from seed $seed end as they should"
done
finish
