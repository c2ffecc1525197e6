#!/bin/bash
# find_config.t: published runs are predicted, layouts cost as much as their dry runs, and a search prints
# what its reader needs. TAP.
# needs: build/08_mixed_precision/find_config build/08_mixed_precision/train_5d
. "$(dirname "$0")/tap.sh"
program=08_mixed_precision/find_config
csv=08_mixed_precision/published.csv

# figure LINE FIELD: a percentage in the summary that the last run printed.
figure() { grep -E "^  $1" "$out" | awk -v n="$2" '{ v = $(NF - 3 + n); sub("%", "", v); print v }'; }
# holds NAME EXPRESSION: the awk expression is true.
holds() {
    wanted "$1" || return 0
    awk "BEGIN { exit !($2) }"
    report $? "$1"
}

passes "published runs" $program --runs $csv --fit --fitted "$work/fitted.h" --json "$work/runs.json"
fitted=$(figure 'fitted on these' 1) left=$(figure 'its series left out' 1)
holds "published runs: the fit is within 4% in the median" "\"$fitted\" != \"\" && $fitted + 0 <= 4"
holds "published runs: left out, within 5%" "\"$left\" != \"\" && $left + 0 <= 5 && $left > $fitted"
most=$(figure 'its series left out' 2)
holds "published runs: left out, none beyond 40%" "\"$most\" != \"\" && $most + 0 <= 40"
holds "published runs: left out, nine of ten within 20%" "$(figure 'its series left out' 3) + 0 >= 90"
holds "published runs: a constant share is worse" "$(figure 'constant share' 1) > 2 * $left"
own=$(figure "the same, as this book's own step" 1)
holds "published runs: as this book's own step, within 15%" "\"$own\" != \"\" && $own + 0 <= 15 && $own > $left"
printed=$(awk '/FITTED_MEDIAN/ { printf "%.1f", 100 * $3 }' "$work/fitted.h" 2>/dev/null)
holds "published runs: the error that a search prints is that of steps as it clocks them" \
    "\"$own\" != \"\" && \"$own\" == \"$printed\""
most=$(figure 'ratios of partners' 2)
holds "published runs: no ratio of partners is off by more than 15%" "\"$most\" != \"\" && $most + 0 <= 15"
cmp -s "$work/fitted.h" 08_mixed_precision/fitted.h
report $? "published runs: the factors and errors in the source are those that this fit has written"
head -n 3 $csv >"$work/few.csv"
passes "few published runs" $program --runs "$work/few.csv"
[ "$(grep -cE ' 0 +- +- +-$' "$out")" = 4 ] && ! grep -q nan "$out"
report $? "few published runs: no error is shown where there is none"
if wanted "few published runs, by tokens a second of a GPU"; then
    python3 - "$work/few.csv" >"$work/rate.csv" <<'PYTHON'
import csv, sys
rows = csv.DictReader(open(sys.argv[1]))
table = csv.DictWriter(sys.stdout, rows.fieldnames)
table.writeheader()
for row in rows:
    tokens = int(row['gbs']) * int(row['seq'])
    row['tok_s_gpu'], row['step_s'] = repr(tokens / float(row['step_s']) / int(row['n_gpus'])), ''
    table.writerow(row)
PYTHON
    timed() { run "$build/$program" --runs "$1" && grep '%' "$out"; }
    by_seconds=$(timed "$work/few.csv")
    [ -n "$by_seconds" ] && [ "$by_seconds" = "$(timed "$work/rate.csv")" ]
    report $? "few published runs, by tokens a second of a GPU: as by the seconds of a step"
fi
refused "and there are none: --runs must have more than 8 series" $program --runs "$work/few.csv" --fit \
    --fitted "$work/few.h"
passes "layouts of 8 GPUs beside dry runs on 8 ranks" $program --agree
passes "the playbook's rules and appendix A3" $program --rules
[ "$(grep -c '^  holds: ' "$out")" = 15 ]
report $? "the playbook's rules: all 15 are asked"
passes "a search" $program --model llama-3.2-1b --gpus 8 --batch-tokens 256K --seq 4096 \
    --curves "$work/curves.svg" --heat-map "$work/heat_map.svg" --json "$work/search.json"
grep -q 'train_5d --no-check --model llama-3.2-1b .*--ranks 8 ' "$out" &&
    grep -q '"layout 10"' "$work/search.json"
report $? "a search prints the best one's command line, and ten layouts in --json"
wanted "a search: ZB-H1 of few micro-batches" && run "$build/$program" --model llama-3-8b --gpus 256 \
    --batch-tokens 256K --seq 2048
grep -qE '^ +1 +8 +4 +8 +1 +1 +4 +4 zb_h1 ' "$out"
report $? "a search: ZB-H1 of few micro-batches, whose closed form is 10% too long, is among the best"
# best NAME PATTERN FLAGS…: the first row of a search matches.
best() {
    local name="a search: $1" row=$2
    shift 2
    wanted "$name" || return 0
    run "$build/$program" "$@" --json "$work/found.json" &&
        sed -n '/^   tp  cp/ { n; p; }' "$out" | grep -qE "$row"
    report $? "$name"
}
best "more ranks of tp than heads of K/V" '^ +2 +4 .* small multiplies: less tp$' --model llama-3.2-1b --kv-heads 1 --gpus 8 --batch-tokens 8K \
    --seq 8192
# agrees NAME: the command, and the layout in --json, are those of the first row.
agrees() {
    wanted "a search: $1" || return 0
    python3 - "$out" "$work/found.json" >"$err" 2>&1 <<'PYTHON'
import json, re, sys
text = open(sys.argv[1]).read()
row = re.search(r'^   tp  cp.*\n(.*)$', text, re.M).group(1).split()
words = re.search(r'^  build/08_mixed_precision/train_5d (.*)$', text, re.M).group(1).split()
after = {word: value for word, value in zip(words, words[1:] + [''])}
way, _, chunks = row[8].partition('/')
ways = {'-': None, 'afab': 'afab', '1f1b': 'interleaved' if chunks else 'one_f_one_b', 'zb_h1': 'zb_h1'}
wanted = {'--tp': row[0].rstrip('s'), '--pp': row[2], '--dp': row[3], '--zero': row[5],
          '--micro-batch': row[6], '--grad-acc': row[7], '--cp': row[1] if row[1] != '1' else None,
          '--context': 'zigzag' if row[1] != '1' else None, '--ep': row[4] if row[4] != '1' else None,
          '--schedule': ways[way], '--chunks': chunks or None,
          '--bucket-mb': '25' if row[5] == '0' else None}
for flag, value in wanted.items():
    assert after.get(flag) == value, (flag, after.get(flag), value)
assert ('--sp' in after) == row[0].endswith('s')
numbers = json.load(open(sys.argv[2]))['numbers']['layout 1']
schedule = ['afab', 'one_f_one_b', 'interleaved', 'zb_h1'].index(ways[way] or 'one_f_one_b')
of_row = {'tp': row[0].rstrip('s'), 'cp': row[1], 'pp': row[2], 'dp': row[3], 'ep': row[4], 'zero': row[5],
          'micro-batch': row[6], 'micro-batches': row[7], 'sp': row[0].endswith('s'), 'schedule': schedule,
          'chunks': chunks or 1, 'recompute': {'none': 0, 'full': 2}[row[9]]}
for name, value in of_row.items():
    assert numbers[name]['value'] == int(value), (name, numbers[name]['value'], value)
PYTHON
    report $? "a search: $1"
}
best "cp beyond 16" '^ +1 +32 .* small multiplies: larger mbs$' --model llama-3.2-1b --gpus 32 --seq 262144 --batch-tokens 256K
agrees "cp beyond 16: the command has it"
best "a width that tp does not divide" '^ +1 +4 .* exposed dp: larger mbs, or pp$' --ffn 14337 --gpus 4 --batch-tokens 4K
best "rows of experts that tp does not divide" '^ +1 ' --model mixtral-8x7b --seq 4097 --batch-tokens 4097 \
    --gpus 8 --layers 8
best "nodes of one GPU" '^ +1 +1 +8 +1 .* bubble: more micro-batches$' --gpus 8 --batch-tokens 32K --gpus-per-node 1
grep -q 'train_5d .* --gpus-per-node 1 ' "$out"
report $? "a search: nodes of one GPU: the command names them"
agrees "nodes of one GPU: the command has ZB-H1, and all else"
best "experts and chunks" '^ .* 1f1b/.* exposed tp, cp, ep: less of it$' --model mixtral-8x7b --layers 16 --gpus 16 --batch-tokens 1M
agrees "experts and chunks: the command has them"
best "a number of layers that chunks do not divide" '^ +1 +1 +5 .* 1f1b .* bubble: more micro-batches$' \
    --model mixtral-8x7b --layers 5 --gpus 5 --gpus-per-node 1 --batch-tokens 64K
agrees "a number of layers that chunks do not divide: the command has 1F1B"
best "another machine" '^ ' --gpus 4 --layers 4 --batch-tokens 64K --machine dgx-a100
grep -q 'train_5d .* --machine dgx-a100' "$out"
report $? "a search: another machine: the command names it"
for picture in curves heat_map; do
    cmp "$work/$picture.svg" 08_mixed_precision/$picture.svg >"$err" 2>&1
    report $? "a search, whatever it looks for, draws the page's $picture"
done
# same_layout NAME SHAPE FLAGS…: the command line that a search prints has the shape that was searched, by the
# first line of its dry run, and takes as much memory as the search said.
same_layout() {
    local name="the command of the best layout: $1" shape=$2 command memory
    shift 2
    wanted "$name" || return 0
    run "$build/$program" "$@" &&
        memory=$(awk '/^   tp  cp/ { getline; print $11, $12 }' "$out") &&
        command=$(sed -n 's|^  build/\(08_mixed_precision/train_5d\) |\1 --dry-run |p' "$out") &&
        run "$build"/${command:-no command} && grep -q "^$shape" "$out" &&
        grep -q "^memory of rank 0 at its peak: $memory\$" "$out"
    report $? "$name"
}
same_layout "a shape of one's own, experts, heads of their own size, tied" \
    "L=2 h=64 a=4 kv=2 d=32 f=96 v=512 s=256 tied, bf16, .* 0.16 M" --layers 2 --hidden 64 --heads 4 \
    --kv-heads 2 --ffn 96 --vocab 512 --seq 256 --gpus 2 --batch-tokens 2K --experts 4 --expert-ffn 48 \
    --head-size 32 --tied
grep -q '^4 experts of f=48, top 2' "$out"
report $? "the command of the best layout: a shape of one's own, and its experts"
same_layout "nobody's model" "L=2 h=4096 a=32 kv=8 f=14336 v=128256 s=4096 untied, bf16" --layers 2 \
    --gpus 2 --batch-tokens 8K
if wanted "the command of the best layout: nobody's model by its name"; then
    run "$build/$program" --layers 2 --gpus 2 --batch-tokens 8K
    grep -q 'train_5d --no-check --model llama-3-8b --layers 2 --dtype' "$out"
    report $? "the command of the best layout: nobody's model by its name, and so by its base of RoPE"
fi
same_layout "a preset that flags have changed" "L=2 h=4096 .* s=512 untied, bf16" \
    --model mixtral-8x7b --layers 2 --top-k 1 --seq 512 --gpus 4 --batch-tokens 8K
grep -q '^8 experts of f=14336, top 1' "$out"
report $? "the command of the best layout: a preset that flags have changed, and its experts"
same_layout "DeepSeek's" "L=2 h=7168" --model deepseek-v3 --layers 2 --experts 16 --routed-scale 1.5 \
    --seq 512 --gpus 4 --batch-tokens 8K
long="--layers 8 --gpus 1 --batch-tokens 64K --seq 32768"
same_layout "one that recomputes" "L=8 h=4096 .* s=32768" $long
if wanted "what costs most"; then
    run "$build/$program" $long && grep -qE '% +[0-9]+% recomputes: tp or pp for memory$' "$out"
    report $? "what costs most of one that recomputes"
fi
passes "64 GPUs" $program --json "$work/64.json"
# Llama 3 8B's FLOPs of 1,024 sequences of 4096, counted here, over what 64 H100 could compute in that time.
if wanted "64 GPUs: MFU"; then
    python3 -c 'import json, sys
h, f, v, s, layers, heads, d = 4096, 14336, 128256, 4096, 32, 32, 128
weights = layers * (2 * h * h + 2 * h * 8 * d + 3 * h * f) + v * h
flops = 1024 * (6 * s * weights + 12 * d * heads * layers * s * (s + 1) / 2)
for name, layout in json.load(open(sys.argv[1]))["numbers"].items():
    if not name.startswith("layout"): continue
    mfu = flops / 64 / layout["step"]["value"] / 989e12
    assert abs(layout["mfu"]["value"] / mfu - 1) < 1e-6, (name, mfu)' "$work/64.json" 2>"$err"
    report $? "64 GPUs: MFU is the share of the peak that the model needs"
fi
if wanted "64 GPUs: the best of more than ten that were clocked"; then
    # The ten fastest by closed forms are the slower ones: the tenth of them takes 6.46 s.
    python3 -c 'import json, sys
layouts = json.load(open(sys.argv[1]))["numbers"]
steps = [layouts["layout %d" % i]["step"]["value"] for i in range(1, 11)]
assert steps == sorted(steps) and steps[9] < 6.4, steps' "$work/64.json" 2>"$err"
    report $? "64 GPUs: the best of more than ten that were clocked"
fi
grep -A 1 '"recompute"' "$work/64.json" 2>/dev/null |
    sed -n 's/.*"value":[[:space:]]*\([0-9]*\).*/\1/p' | sort -u >"$err"
grep -qx 0 "$err" && ! grep -qx 1 "$err"
report $? "64 GPUs: no layout recomputes selectively, which saves nothing with flash attention"
on_terminal "$build/$program --gpus 1 --model llama-3-405b"
grep -q 'find_config: no layout of 1 GPU fits: weights, .* state alone fill 97' "$out"
report $? "a model that is too large: how many GPUs its states fill, at 18 bytes per parameter"
grep -qE '\[#*-+\] +[0-9]+%: layouts are priced' "$out"
report $? "a bar while it searches"
passes "sequences shorter than cp would shard, of odd length" $program --model default --seq 15 --gpus 2 \
    --batch-tokens 150
run "$build/$program" --model default --gpus 7 --batch-tokens 64K
grep -q 'of 7 GPUs is legal: dp x pp x cp x tp is 7, where dp divides the sequences of a step (512)' "$out"
report $? "GPUs that no layout takes: the rules"
refused ": --heads 128 x --seq 100000000 squared" $program --model llama-3-405b --seq 100000000 \
    --batch-tokens 100000000
refused "--batch-tokens 4X" $program --batch-tokens 4X
refused "--batch-tokens 1G is not divisible by --seq 3: 1073741826 would fit" $program \
    --batch-tokens 1G --seq 3
refused "--dtype f32" $program --dtype f32
refused "--fit is of published runs: add --runs FILE" $program --fit
refused "--fitted is of published runs: add --runs FILE" $program --fitted "$work/a.h"
refused "--runs, --agree and --rules each take the place of the search: give one of them" $program --rules --agree
refused "--heat-map is drawn beside a search: leave out --rules" $program --rules --heat-map "$work/a.svg"
refused "--heat-map is drawn beside a search: leave out --agree" $program --agree --heat-map "$work/a.svg"
refused "--curves is drawn beside a search or --rules: leave out --runs" $program --runs $csv --curves \
    "$work/a.svg"
refused "--runs has models and clusters of its own: leave out --gpus" $program --runs $csv --gpus 8
refused "--runs has models and clusters of its own: leave out --machine" $program --runs $csv --machine h200
refused "--agree has models and clusters of its own: leave out --batch-tokens" $program --agree \
    --batch-tokens 1M
refused "--agree has models and clusters of its own: leave out --gpus-per-node" $program --agree \
    --gpus-per-node 4
refused "--rules has models and clusters of its own: leave out --machine" $program --rules --machine h200
refused "--rules has models of its own: leave out --model" $program --rules --layers 3
refused "--rules has models of its own: leave out --model" $program --rules --seq 8192
refused "--runs /nonexistent" $program --runs /nonexistent
head -n 1 $csv | sed 's/,gbs,/,batch,/' >"$work/a.csv" && sed -n 2p $csv >>"$work/a.csv"
refused "has no column gbs" $program --runs "$work/a.csv"
sed -n 1,2p $csv | sed '2s/,3072,8,/,3071,8,/' >"$work/b.csv"
refused "tp x cp x pp x dp is 3072" $program --runs "$work/b.csv"
# cell COLUMN VALUE [SENTENCE]: the table is refused if its first run has this value in this column.
cell() {
    sed -n 1,2p $csv | awk -F, -v OFS=, -v name="$1" -v value="$2" '
        NR == 1 { for (i = 1; i <= NF; i++) if ($i == name) at = i }
        NR == 2 { $at = value }
        1' >"$work/c.csv"
    if [ -n "$3" ]; then
        refuses "--runs refuses $2 in column $1" "c.csv, line 2: $3" $program --runs "$work/c.csv"
        return
    fi
    refuses "--runs refuses $2 in column $1" \
        "c.csv, line 2: column $1 must be a whole number from 1 to 100000000, and not \"$2\"" $program \
        --runs "$work/c.csv"
}
cell mbs 0
cell ep 0
cell etp 0
cell gpus_per_node 0
cell pp 63.5
cell ep 7 'ep x etp, 7, does not divide dp x cp x tp'
cell vpp 3 'pp x vpp is 192, more than layers 128'
cell zero 4 'column zero must be a whole number from 0 to 3, and not "4"'
cell ffn_mats 1e10 'column ffn_mats must be a whole number from 2 to 3, and not "1e10"'
for number in 1e300 1e-300 nan -1; do
    cell step_s $number "column step_s must be 0 or a number from 1e-15 to 1e15, and not \"$number\""
done
cell dense_layers 129 'dense_layers 129 is more than layers 128'
cell experts 8 'experts 8, without topk and expert_ffn'
cell gpu $'\e[2J' 'GPU \?\[2J is not known'
cell heads 0.5
cell kv_heads 7 'kv_heads 7 does not divide heads 160'
cell recompute Full 'column recompute must be one of none selective full modules, and not "Full"'
cell sp Yes 'column sp must be one of yes no, and not "Yes"'
cell precision FP16 'column precision must be one of bf16 fp16 fp8, and not "FP16"'
cell gpu GH200 'GPU GH200 is not known'
{ printf '\xef\xbb\xbf'; sed -n 1,2p $csv; sed -n 2p $csv; } >"$work/f.csv"  # as a table program writes UTF-8
refused "f.csv, line 3: id A01 stands there twice" $program --runs "$work/f.csv"
{ sed -n 1p $csv; sed -n 2p $csv | sed 's/52% is/"52%\nis"/'; sed -n 2p $csv; } >"$work/h.csv"
refused "h.csv, line 4: id A01 stands there twice" $program --runs "$work/h.csv"  # line 3 ends a cell
awk -F, -v OFS=, 'NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i; print } NR > 1 && $at["experts"] > 1 {
    $at["topk"] = $at["experts"] + 1; print; exit }' $csv >"$work/g.csv"
refuses "--runs refuses more experts of a token than there are" \
    'g.csv, line 2: topk [0-9]+ is more than experts [0-9]+$' $program --runs "$work/g.csv"
{ sed -n 1,2p $csv; printf '\0\n'; sed -n 3p $csv; } >"$work/d.csv"
refuses "--runs refuses a table that a zero byte cuts" 'd.csv: it is no text: byte [0-9]+ is a zero$' \
    $program --runs "$work/d.csv"
sed -n 1,2p $csv | sed '1s/,seq,/,vocab,/' >"$work/e.csv"
refused "e.csv: column vocab stands there twice" $program --runs "$work/e.csv"
finish
