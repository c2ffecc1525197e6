#!/bin/bash
# lines.t: communication lines on 1 to 8 ranks, and what a user sees when calls cross or collide. TAP.
# needs: build/tests/test_lines
. "$(dirname "$0")/tap.sh"
lines=$build/tests/test_lines
limit=60  # seconds, after which it hangs

for ranks in 1 2 3 4 6 8; do
    wanted "every test of test_lines on $ranks ranks" || continue
    all_tests "$lines" --ranks $ranks
    report $? "every test of test_lines on $ranks ranks"
done

# ends SCENARIO PATTERN: 4 ranks end with status 2 long before the timeout, after one line on stderr, which
# matches. Likewise in a dry run.
ends() {
    local flags
    for flags in '' --dry-run; do
        wanted "$1" || return
        run "$lines" --scenario "$1" $flags
        one_line $? -E "$2"
        report $? "$1${flags:+, dry run}: $(head -n 1 "$err")"
    done
}
# If the first of a rank's two calls has already met its counterpart, only the second can be named.
met='rank [0-3] called (all_reduce|send|receive)\(.*\) in group (tp|dp) before another call that it shares'
met="$met with rank"
order=': two ranks must start the calls that they share in the same order'
tp='called all_reduce\(1024 f32\) in group tp' dp='called all_reduce\(2048 f32\) in group dp'
ends crossed "rank 2 $dp where rank [01] $tp$order|rank 3 $tp where rank 2 $dp$order|$met"
ends crossed-late "rank [123] $dp where rank 0 $tp$order|$met"
either='called all_reduce\((1024|2048) f32\) in group (tp|dp)'
ends crossed-waits "$either where rank . $either$order|$met"
ends crossed-behind-trusted "$either where rank . $either$order|$met"
ends crossed-receives \
    "rank 1 called receive\(2048 f32 from rank 0\) in group tp where rank 0 called receive\(1024 f32 from \
rank 1\) in group dp$order|$met"
ends crossed-transfers \
    "rank 1 called send\(2048 f32 to rank 0\) in group dp where rank 0 called send\(1024 f32 to rank 1\) \
in group tp$order|$met"
host='called all_reduce\(1 f64 on the host\) in group tp'
ends crossed-host "rank 1 $host where rank 0 $dp$order|rank [23] $dp where rank 1 $host$order|$met"
first=': comm_wait comes first'
first_4k="'activations' \[bytes 0\.\.4096\)" still='call 1 in group dp, is still'
ends written-while-read "op_add writes $first_4k, which all_gather, $still reading$first"
ends read-while-written \
    "op_copy reads 'activations' \[bytes 4000\.\.8096\), which all_reduce, $still writing$first"
ends host-reads \
    "tensor_to_host reads 'activations' \[bytes 0\.\.8192\), which all_reduce, $still writing$first"
ends host-writes "tensor_from_host writes $first_4k, which transfers, $still reading$first"
ends two-lines "broadcast (reads|writes) $first_4k, which all_reduce, $still (reading|writing)$first"
ends root-writes \
    "rank 1: op_scale writes $first_4k, which reduce, $still reading$first|is still writing$first"

finish
