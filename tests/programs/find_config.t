#!/bin/bash
# find_config.t: published runs are predicted, layouts cost what their dry runs do, and a search prints what
# its reader needs. TAP.
# needs: build/08_mixed_precision/find_config
. "$(dirname "$0")/tap.sh"
program=08_mixed_precision/find_config
csv=08_mixed_precision/published.csv

# figure LINE FIELD: a percentage of the summary that the last run printed.
figure() { grep -E "^  $1" "$out" | awk -v n="$2" '{ v = $(NF - 3 + n); sub("%", "", v); print v }'; }
# holds NAME EXPRESSION: of awk.
holds() {
    wanted "$1" || return 0
    awk "BEGIN { exit !($2) }"
    report $? "$1"
}

passes "published runs" $program --runs $csv --fit --fitted "$work/fitted.h" --json "$work/runs.json"
fitted=$(figure 'fitted on these' 1) left=$(figure 'its series left out' 1)
holds "published runs: the fit is within 4% in the median" "\"$fitted\" != \"\" && $fitted + 0 <= 4"
holds "published runs: left out, within 5%" "\"$left\" != \"\" && $left + 0 <= 5 && $left > $fitted"
holds "published runs: left out, none beyond 40%" "$(figure 'its series left out' 2) + 0 <= 40"
holds "published runs: left out, nine of ten within 20%" "$(figure 'its series left out' 3) + 0 >= 90"
holds "published runs: a constant share is worse" "$(figure 'constant share' 1) > 2 * $left"
holds "published runs: no ratio of partners is off by more than 15%" \
    "$(figure 'ratios of partners' 2) + 0 <= 15"
cmp -s "$work/fitted.h" 08_mixed_precision/fitted.h
report $? "published runs: the factors and errors in the source are those that this fit has written"
passes "30 layouts of 8 GPUs beside dry runs on 8 ranks" $program --agree
passes "the playbook's rules and appendix A3" $program --rules
[ "$(grep -c '^  holds: ' "$out")" = 13 ]
report $? "the playbook's rules: all 13 are asked"
passes "a search" $program --model llama-3.2-1b --gpus 8 --batch-tokens 256K --seq 4096 \
    --curves "$work/curves.svg" --json "$work/search.json"
grep -q 'train_5d --no-check --model llama-3.2-1b .*--ranks 8 ' "$out" && grep -q '</svg>' \
    "$work/curves.svg" &&
    grep -q '"layout 10"' "$work/search.json"
report $? "a search prints the best one's command line, and ten layouts in --json"
refused "--batch-tokens 4X" $program --batch-tokens 4X
refused "--dtype f32" $program --dtype f32
refused "--runs /nonexistent" $program --runs /nonexistent
head -n 1 $csv | sed 's/,gbs,/,batch,/' >"$work/a.csv" && sed -n 2p $csv >>"$work/a.csv"
refused "has no column gbs" $program --runs "$work/a.csv"
sed -n 1,2p $csv | sed '2s/,3072,8,/,3071,8,/' >"$work/b.csv"
refused "tp x cp x pp x dp is 3072" $program --runs "$work/b.csv"
finish
