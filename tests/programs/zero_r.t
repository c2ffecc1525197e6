#!/bin/bash
# zero_r.t: ZeRO-R on 1 to 8 ranks, in every dtype, with buffers of every size. TAP.
# needs: build/02_zero/zero_r
. "$(dirname "$0")/tap.sh"
export OMP_NUM_THREADS=1
build=$build/02_zero
verdict='.*1[12] counts as predicted' # one rank alone sends nothing, and has one fewer
small="--layers 2 --steps 2 --vocab 600"

passes "as it stands" zero_r
prints "as it stands: its tables" "Activations of rank 0: what it keeps of the blocks' inputs, the most it holds …" \
    "whole 71424 652928 963072 32.2%" "sharded, all in one tensor 17856 599360 599488 0.0%" \
    "The buffer that gradients are sent from, for a model of 3 blocks and one of 6:"
awk '/kept, bytes/ { seen = 1 } seen && $NF ~ /%$/ { hole[++n] = $NF + 0 }
    END { exit !(n == 3 && hole[1] > 20 && hole[3] < 1) }' "$out"
report $? "and a fifth of the heap, or more, is in holes where checkpoints stand anywhere"
for ranks in 1 2 3 6; do passes "$ranks ranks" zero_r $small --ranks $ranks; done
for dtype in f32 bf16 f16; do passes "in $dtype, tied, AdamW" zero_r $small --ranks 2 --dtype $dtype \
    --tied --optimizer adamw --lr 0.001; done
# If the logits do not dominate the peak, the holes of backward show.
passes "backward: uneven checkpoints" zero_r --ranks 4 --layers 3 --vocab 300 --hidden 42 --heads 3 \
    --kv-heads 1 --micro-batch 1 --steps 1
grep -q '^  sharded, all in one tensor .* 0\.[0-9]%$' "$out"
report $? "backward: its gradients leave no hole"
passes "a head narrower than the model leaves holes within a block" zero_r --ranks 3 --layers 2 --heads 1 \
    --kv-heads 1 --head-size 4 --ffn 54 --vocab 259 --seq 18 --dtype f32 --grad-acc 1 --steps 1
passes "heads wider than the model" zero_r --ranks 2 --head-size 16
passes "a buffer of a single element" zero_r --ranks 2 --layers 1 --hidden 8 --heads 2 --kv-heads 1 \
    --ffn 5 --vocab 300 --seq 5 --steps 1 \
    --buffer-bytes 15
passes "a buffer larger than all gradients" zero_r $small --ranks 2 --buffer-bytes 1000000000
passes "fewer elements than ranks" zero_r --ranks 8 --layers 1 --hidden 6 --heads 3 --kv-heads 1 --ffn 5 \
    --vocab 300 --seq 1 \
    --micro-batch 1 --steps 1
run "$build/zero_r" $small --ranks 2 --trace "$work/t.json" &&
    grep -q '"rank 0, model clock' "$work/t.json" && grep -q '"rank 1, model clock' "$work/t.json"
report $? "one trace has both ranks"
python3 - "$work/t.json" >"$out" 2>&1 <<'PYTHON'
import json, sys
events = json.load(open(sys.argv[1]))['traceEvents']
begins, ends = ({(e['pid'], e['tid'], e['id2']['local']): float(e['ts']) for e in events if e['ph'] == kind}
                for kind in 'be')
assert begins and set(begins) == set(ends), (len(begins), len(ends))
assert all(begins[call] <= ends[call] for call in begins)
PYTHON
report $? "one trace has both ranks: each call that begins on the wall clock ends there"
run "$build/zero_r" --ranks 2 --dtype f64 --buffer-bytes 7
one_line $? -F '--buffer-bytes 7 is out of bounds'
report $? "a buffer without room is refused"
finish
