#!/bin/bash
# hugging_face.t: folders as transformers writes them, in programs on one and on many ranks: heads of a size
# other than hidden / heads, Llama 3.1's RoPE, what a folder says besides its weights. TAP. Numbers are
# compared with transformers' own in tests/unit/test_hugging_face.c.
. "$(dirname "$0")/tap.sh"
export OMP_NUM_THREADS=1

# Each closed form of memory, bytes sent and FLOPs has q and o of width a d.
for d in 2 10; do
    passes "heads of $d: recomputation" 00_single_gpu/recompute --head-size $d
    passes "heads of $d: flash attention, counted" 00_single_gpu/train --head-size $d --attention flash \
        --recompute selective \
        --steps 2 --dry-run
done
for program in 02_zero/zero3 03_tensor_parallel/sequence_parallel 04_context_parallel/ulysses \
    04_context_parallel/ring_attention 05_pipeline_parallel/one_f_one_b; do
    passes "heads of 10: $program" $program --head-size 10 --layers 4 --steps 1
done
# such heads free the width from being a multiple of their number
odd="--hidden 50 --heads 3 --kv-heads 3 --head-size 16 --ffn 48"
passes "3 heads of 16, h 50: saved" 00_single_gpu/train $odd --layers 1 --steps 2 --save "$work/odd"
grep -q '^WARNING: --hidden 50 is not divisible by --heads 3: transformers 4 loads' "$out"
report $? "3 heads of 16, h 50: which transformers 5 refuses, and that is said"
passes "3 heads of 16, h 50: read again" 00_single_gpu/train --init "$work/odd" --steps 1
passes "3 heads of 16, h 50: tensor parallelism" 03_tensor_parallel/tensor_parallel $odd --ranks 3 --steps 1
refused '--hidden 50 is not divisible by --heads 3: --hidden 51 would fit, or any with --head-size' \
    00_single_gpu/train --hidden 50 --heads 3 --kv-heads 3
refused '--head-size 7 is odd, and RoPE turns pairs: 8 would fit' 00_single_gpu/train --head-size 7

# Tokens as llm.c stores them: 256 int32, magic 20240520 (GPT-2), version 1, 4000 tokens; then 0 to 24,
# again and again
{
    printf '\x88\xd8\x34\x01\x01\x00\x00\x00\xa0\x0f\x00\x00'; head -c 1012 /dev/zero
    for _ in $(seq 160); do for i in $(seq 0 24); do printf "\\x$(printf %02x $i)\\x00"; done; done
} >"$work/tokens.bin"
scaled=tests/fixtures/llama_scaled_f32
data="--data $work/tokens.bin --seq 16"
for program in 01_data_parallel/ddp_bucketed 03_tensor_parallel/tensor_parallel \
    04_context_parallel/zigzag_ring_attention \
    05_pipeline_parallel/afab; do
    passes "begins with Llama 3.1's weights: $program" $program --init $scaled $data --ranks 2 --steps 2
done
grep -q "^begins with the weights of $scaled, at step 0" "$out"
report $? "begins with Llama 3.1's weights, and says so"
passes "trains them on, and saves" 00_single_gpu/train --init $scaled $data --steps 3 --sample 0 \
    --save "$work/saved"
if [ "$only" = '*' ]; then
    config=$work/saved/step-000003/config.json
    rope='"rope_type":"llama3","factor":8.0,"low_freq_factor":0.45,"high_freq_factor":3.0'
    grep -qF "\"rope_scaling\": {$rope,\"original_max_position_embeddings\":20}" "$config" &&
            grep -q '"head_dim": 10' "$config" &&
            grep -q '"max_position_embeddings": 29' "$config" &&
        ! grep -q rope_parameters "$config"
    report $? "what was saved says its RoPE and its heads"
    passes "and goes on" 02_zero/zero1 --resume "$work/saved" $data --ranks 2 --micro-batch 4 --grad-acc 1 \
        --steps 4 \
        --dtype f32 --optimizer adamw
fi
refused 'leave out --model, --layers, --hidden, --heads, --kv-heads, --head-size' 00_single_gpu/train \
    --init $scaled $data --head-size 10
cp -r $scaled "$work/biased" && sed -i 's/"attention_bias": false/"attention_bias": true/' \
    "$work/biased/config.json"
refused '"attention_bias" is true; this program has no biases' 00_single_gpu/train \
    --init "$work/biased" $data
finish
