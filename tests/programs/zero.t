#!/bin/bash
# zero.t [PATTERN]: ZeRO against DDP on the same ranks, bit for bit, and against one device: tied
# embeddings, unequal and empty parts, accumulation, recomputation, AdamW, f64 and bf16. A pattern chooses
# among the tests' names. TAP.
# needs: build/02_zero/zero1 build/02_zero/zero2 build/02_zero/zero3
. "$(dirname "$0")/tap.sh"
export OMP_NUM_THREADS=1
build=$build/02_zero
verdict='.*exact, 0 bits'

for program in zero1 zero2 zero3; do
    passes "$program, 3 ranks, SGD, AdamW, forward alone" $program --ranks 3 --layers 2
    passes "$program, 4 ranks, tied, AdamW, 3 micro-batches, full recomputation" $program --ranks 4 --tied \
        --optimizer adamw --lr 0.001 --grad-acc 3 --layers 2 --recompute full --steps 2
    # 16-bit gradients are summed over micro-batches and ranks in f32; with more than one layer, bf16's own
    # error would hide a wrong factor.
    passes "$program, 3 ranks, bf16, 2 micro-batches" $program --ranks 3 --dtype bf16 --grad-acc 2 \
        --layers 1 --steps 2
    # The head's unit is a single norm of 4 elements.
    passes "$program, 6 ranks, some of which own nothing of the head" $program --ranks 6 --tied --hidden 4 \
        --heads 2 \
        --kv-heads 1 --ffn 3 --layers 1 --seq 7 --steps 2
    model="Llama 3 8B, 6 ranks, 16384 tokens on each, on the model clock:"
    case $program in
        zero1) lines=("$model"
            "Updated weights, gathered after the step, in it, or in the next forward: no bit may change") ;;
        zero2) lines=("With 2 micro-batches and SGD:") ;;
        zero3) lines=("$model" "With 2 micro-batches, SGD and no prefetch:"
            "DDP, bucketed 1121.74 120.19 9.15 7.6% 53.5 GB"
            "What rank 0 holds at its peak, and sends; Psi = 8.03 B parameters, N = 6 ranks:"
            "ZeRO-3 (2 + 6 + 12) Psi / N 26.8 GB 4.16 GB 8.51 GB 16.1 GB 3 Psi 51.8 GB 51.8 GB"
            "Llama 3 8B: ZeRO-3's communication is hidden up to DP = …") ;;
    esac
    prints "$program, 6 ranks, some of which own nothing of the head: what follows the proof" "${lines[@]}"
done
refused "--svg shows what the ranks of --dp hold, and there is one" zero3 --ranks 1 --svg "$work/x.svg"
passes "zero3, a picture" zero3 --ranks 2 --layers 1 --steps 1 --svg "$work/stages.svg"
if wanted "zero3, a picture: bars as long as the bytes of the table, one behind the other"; then
    cp "$out" "$work/table"
    tests/programs/legible.py "$work/stages.svg" >"$out" && [ ! -s "$out" ] &&
        python3 - "$work/stages.svg" "$work/table" >"$out" 2>&1 <<'PYTHON'
import re, sys, xml.etree.ElementTree as tree
svg = '{http://www.w3.org/2000/svg}'
root = tree.parse(sys.argv[1]).getroot()
bars, drawn, held = {}, {}, {}
for box in root.findall(svg + 'rect'):
    if box.get('height') == '22':
        bars.setdefault(int(box.get('y')), []).append((float(box.get('x')), float(box.get('width'))))
for text in root.findall(svg + 'text'):
    if text.get('class') == 'name': drawn[text.text] = bars[int(text.get('y')) - 15]
for line in open(sys.argv[2]):
    row = re.match(r'  (DDP, bucketed|ZeRO-[123]) .* Psi.* GB  ([\d.]+) GB +([\d.]+) GB +([\d.]+) GB  ', line)
    if row: held[row[1]] = [float(size) for size in row.groups()[1:]]
assert len(held) == len(bars) == 4 and set(held) == set(drawn), (held, drawn)
most = max(map(sum, held.values()))  # 600 pixels
for name, sizes in held.items():
    end = 130
    assert len(drawn[name]) == 3, drawn[name]
    for (x, width), size in zip(drawn[name], sizes):
        assert abs(x - end) < 0.2 and abs(width / 600 * most / size - 1) < 0.01, (name, x, width)
        end = x + width
PYTHON
    report $? "zero3, a picture: bars as long as the bytes of the table, one behind the other"
fi
passes "zero3, 3 ranks, nodes of 2" zero3 --ranks 3 --gpus-per-node 2 --layers 1 --steps 1
passes "zero3, 5 ranks, slow compute: one rank's part is smaller" zero3 --ranks 5 --layers 1 --steps 1 \
    --compute-efficiency 0.01
passes "zero3, half the bandwidth" zero3 --ranks 2 --layers 1 --steps 1 --verbose --network-efficiency 0.5
grep -q '^  forward, one GPU per node  *19780 ' "$out"
report $? "zero3, half the bandwidth: twice as many tokens hide what is sent"
passes "zero3, slow compute: one sequence is enough" zero3 --ranks 2 --layers 1 --steps 1 --verbose \
    --compute-efficiency 0.02
passes "zero3, 2 ranks, documents" zero3 --ranks 2 --documents 32 --layers 2 --steps 1
finish
