#!/bin/bash
# formats.t: the program on number formats reaches its verdict, and prints what the formats' standards say.
# TAP.
# needs: build/08_mixed_precision/formats
. "$(dirname "$0")/tap.sh"
program=08_mixed_precision/formats

# shows NAME PATTERN: a line that the last run printed matches.
shows() {
    wanted "$1" || return 0
    grep -qE -- "$2" "$out"
    report $? "$1"
}

passes "every code, every border, every mean" $program --json "$work/f.json" --svg "$work/f.svg"
shows "e4m3 ends at 448, and begins at 2^-9" '^e4m3 +8 +1 +4 +3 +448 +0.0156 +0.00195 '
shows "e5m2 ends at 57344" '^e5m2 +8 +1 +5 +2 +57344 '
shows "float16 ends at 65504" '^float16 +16 +1 +5 +10 +65504 '
shows "e5m2 shows five of its numbers from 1 to 2" '^e5m2 +\|( {15}\|){4}$'
shows "updates below half a step vanish" '^bfloat16 +1.5 +1 +1.49'
grep -q '"value":[[:space:]]*0.0078125,' "$work/f.json" 2>/dev/null
report $? "--json has bfloat16's epsilon"
[ "$(grep -c '<path' "$work/f.svg" 2>/dev/null)" = 5 ] && tail -n 1 "$work/f.svg" | grep -q '^</svg>$'
report $? "--svg draws five rows"
passes "a value beyond float16" $program --value 70000
shows "is infinity there" '^float16 +0 11111 0000000000 +inf '
shows "and the largest number in e4m3" '^e4m3 +0 1111 110 +448 +-99.4%'
passes "with another seed" $program --seed 7
refused "--seed" $program --seed -1
finish
