#!/bin/bash
# vocab_parallel.t: a vocabulary sharded over 1 to 8 ranks, divisible by them and not, against one device.
# TAP.
# needs: build/03_tensor_parallel/vocab_parallel
. "$(dirname "$0")/tap.sh"
export OMP_NUM_THREADS=1
build=$build/03_tensor_parallel

passes "256 tokens on 3 ranks" vocab_parallel --ranks 3 --heads 6 --kv-heads 3 --ffn 90 --vocab 256
passes "and between regions each rank has its rows" vocab_parallel --ranks 3 --heads 6 --kv-heads 3 \
    --ffn 90 --vocab 256 --sp --tied
passes "4 ranks, 3 micro-batches, tied, AdamW" vocab_parallel --tied --grad-acc 3 --optimizer adamw \
    --lr 0.001
passes "2 ranks in bf16, rows of their own" vocab_parallel --ranks 2 --sp --dtype bf16 --layers 1 --steps 1
passes "2 ranks in f32, tied" vocab_parallel --ranks 2 --tied --dtype f32 --layers 1
passes "one rank, and all of the vocabulary" vocab_parallel --ranks 1 --steps 1
passes "8 ranks, of which the last has the shortest part" vocab_parallel --ranks 8 --sp --seq 13 \
    --layers 1 --steps 2
passes "2 x 2 ranks, recomputing, 259 tokens" vocab_parallel --ranks 4 --dp 2 --tp 2 --sp --recompute full \
    --vocab 259

# 9 tokens on 4 ranks: 3 each, and only padding for the last. A file in llm.c's format: magic, version, count.
escaped=''
for ((i = 0, x = 1; i < 2000; i++)); do escaped+="\\x0$((x % 9))\\x00" x=$(((x * 75 + 74) % 65537)); done
{
    printf '\x88\xd8\x34\x01\x01\x00\x00\x00\xd0\x07\x00\x00'
    head -c 1012 /dev/zero
    printf "$escaped"
} >"$work/tokens.bin"
passes "a rank that has nothing but padding" vocab_parallel --data "$work/tokens.bin" --vocab 9 --tied \
    --steps 2
passes "ranks that begin beyond the vocabulary" vocab_parallel --ranks 8 --data "$work/tokens.bin" --vocab 9 \
    --layers 1 --steps 1
passes "the same, with rows of its own" vocab_parallel --data "$work/tokens.bin" --vocab 9 --sp --steps 2

passes "a checkpoint of 257 tokens, saved by 4 ranks" vocab_parallel --save "$work/saved" \
    --optimizer adamw --lr 0.001 --tied --steps 2
find "$work/saved" -name model.safetensors -exec cat {} + |
    grep -aoE '"model.embed_tokens.weight":\{[^}]*\}' >"$out"
grep -q '"shape":\[257,48\]' "$out"
report $? "has no padding in it"
passes "and goes on with 2 ranks as with one device" vocab_parallel --ranks 2 --resume "$work/saved" \
    --optimizer adamw --lr 0.001 --steps 4

run "$build/vocab_parallel" --ranks 4
awk '/^  maxima and sums/ { own = $4 * ($5 == "kB" ? 1e3 : 1) }
    /^  gathered logits/ { all = $3 * ($4 == "GB" ? 1e9 : 1) }
    END { exit !(own > 0 && all > 1000 * own) }' "$out"
report $? "the loss of Llama 3 8B sends less than a thousandth of its logits"
finish
