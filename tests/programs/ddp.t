#!/bin/bash
# ddp.t: data parallelism on 3 ranks against one device: tied, unequal labels, clipping, f64 and bf16. TAP.
# needs: build/01_data_parallel/ddp_naive build/01_data_parallel/ddp_overlap
# needs: build/01_data_parallel/ddp_bucketed build/01_data_parallel/ddp_no_sync build/00_single_gpu/train
# needs: build/02_zero/zero3
. "$(dirname "$0")/tap.sh"
export OMP_NUM_THREADS=1
build=$build/01_data_parallel

for program in ddp_naive ddp_overlap ddp_bucketed ddp_no_sync; do
    passes "$program, 3 ranks, SGD" $program --ranks 3
    passes "$program, 3 ranks, tied, AdamW, 3 micro-batches" $program --ranks 3 --tied --optimizer adamw \
        --lr 0.001 \
        --grad-acc 3 --layers 2
    # 16-bit gradients are summed over micro-batches and ranks in f32; with more than one layer, bf16's own
    # error would hide a wrong factor.
    passes "$program, 2 ranks, bf16" $program --ranks 2 --dtype bf16 --layers 1 --steps 1
    case $program in
        ddp_bucketed) prints "$program, 2 ranks, bf16: its tables" "Buckets of gradients: …" \
            "Tokens per rank from which all-reduces of Llama 3 8B's layers hide behind backward, 2 ranks:" ;;
        ddp_no_sync) prints "$program, 2 ranks, bf16: its table" "Llama 3 8B, 2 ranks, 2 micro-batches of 4,096…" ;;
    esac
done

# Only rank 0 writes it, and takes longer than the time after which waiting counts as a deadlock.
verdict='held-out loss'
passes "a long sample" ddp_naive --ranks 2 --no-check --steps 2 --eval-every 0 --sample 30000 --timeout 2 \
    --layers 2 --hidden 64 --heads 4 --kv-heads 2 --ffn 128 --seq 128
verdict=''

# On a machine that says it has 180 MB left, 62 MB for each of 2 ranks fit, and for each of 4 do not.
if private_mounts "how ranks share memory, other data and weights"; then
    printf 'MemTotal: 24000000 kB\nMemAvailable: 180000 kB\n' >"$work/meminfo"
    with_180_MB() {
        run unshare -m --propagation private bash -c \
            "mount --bind '$work/meminfo' /proc/meminfo && $build/$*"
    }
    wide="--no-check --layers 1 --hidden 64 --heads 2 --kv-heads 2 --ffn 64 --vocab 30000 --seq 8 --steps 1"
    wide+=" --micro-batch 1 --sample 0 --eval-every 0"
    wanted "ranks share memory" && with_180_MB ddp_naive --ranks 2 $wide
    report $? "ranks share memory: what 2 of them need is there"
    if about cpu "ranks share memory: 4"; then
        with_180_MB ddp_naive --ranks 4 $wide
        one_line $? -F 'left to each of the 4 ranks of this machine; held now: parameters 31.0 MB'
        report $? "ranks share memory: 4 are told before the system kills one: $(cat "$err")"
    fi
    wanted "ranks share memory" && with_180_MB ddp_naive --ranks 24 $wide
    one_line $? -F -- '--ranks 24 does not fit: a rank takes 8.39 MB of memory or more, and 184 MB are left'
    report $? "ranks share memory: 24 are not even started"
    # Weights of 75 MB, which rank 0 gathers while the others wait; no rank asks for 45 MB at once before.
    sharded="--no-check --layers 8 --hidden 384 --heads 2 --kv-heads 2 --ffn 1536 --vocab 256 --seq 8 --steps 1"
    sharded+=" --micro-batch 1 --sample 1 --eval-every 0 --dtype f32"
    wanted "ranks share memory, and one may take it alone" && with_180_MB ../02_zero/zero3 --ranks 4 $sharded &&
        grep -q '^PASS' "$out"
    report $? "ranks share memory, and one may take it alone: $(cat "$err")"
    # Rank 1 finds another file or folder under the same name, as on another host.
    elsewhere() {  # elsewhere THEIRS NAME FLAGS…
        by_mpirun -n 2 unshare -m --propagation private \
            sh -c '[ $OMPI_COMM_WORLD_RANK = 0 ] || mount --bind "$0" "$1" && shift && exec "$@"' \
            "$1" "$2" "$build/ddp_naive" "${@:3}"
    }
    head -c 100000 "$build/../corpus.txt" >"$work/text" && head -c 99999 "$work/text" >"$work/shorter"
    # a byte that no source has, whatever the last of these is
    { cat "$work/shorter" && printf '\1'; } >"$work/edited" && touch -r "$work/text" "$work/edited"
    if wanted "ranks that find other data"; then
        elsewhere "$work/shorter" "$work/text" --data "$work/text" $wide
        one_line $status -F "text: one rank finds 100000 tokens there, and another 99999: all hosts need"
        report $? "ranks that find other data: $(cat "$err")"
    fi
    if wanted "ranks that find other data of one length"; then
        elsewhere "$work/edited" "$work/text" --data "$work/text" $wide
        one_line $status -F "text: not all ranks find the same 100000 tokens there: all hosts need the same file"
        report $? "ranks that find other data of one length: $(cat "$err")"
    fi
    if wanted "ranks that find other weights"; then
        for seed in 1 2; do
            "$build/../00_single_gpu/train" ${wide#--no-check} --seed $seed --save "$work/$seed"
        done >"$out"
        # The other one's tensors under this one's header, which also tells of the run.
        ours=$work/1/step-000001/model.safetensors theirs=$work/2/step-000001/model.safetensors
        header=$((8 + $(od -An -tu8 -N8 "$ours")))
        { head -c $header "$ours" && tail -c +$((header + 1)) "$theirs"; } >"$work/mixed"
        mv "$work/mixed" "$theirs"
        elsewhere "$work/2" "$work/1" --init "$work/1" --no-check --steps 1 --sample 0 --eval-every 0 --seq 8
        one_line $status -F "step-000001: not all ranks find the same files there: all hosts need the same"
        report $? "ranks that find other weights: $(cat "$err")"
        # One byte, one constant, or a note about the run.
        for other in weight rope state; do cp -r "$work/1/step-000001" "$work/$other"; done
        printf x | dd of="$work/weight/model.safetensors" bs=1 seek=$((header + 100000)) conv=notrunc 2>"$err"
        sed -i 's/"rope_theta": 10000/"rope_theta": 10001/' "$work/rope/config.json"
        sed -i 's/"optimizer_step":"1"/"optimizer_step":"2"/' "$work/state/optimizer.safetensors"
        for other in weight rope state; do
            elsewhere "$work/$other" "$work/1/step-000001" --init "$work/1" --no-check --steps 1 --sample 0 \
                --eval-every 0 --seq 8
            one_line $status -F "step-000001: not all ranks find the same files there: all hosts need the same"
            report $? "ranks that find other weights, by one $other: $(cat "$err")"
        done
    fi
fi
finish
