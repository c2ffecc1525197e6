#!/bin/bash
# output.t: what a program prints: its lesson on one screen, every row with --verbose, and as the last line
# of a failure what is wrong, where, and what that usually means; colors and a progress bar only on a
# terminal. TAP.
# needs: build/01_data_parallel/ddp_naive build/01_data_parallel/ddp_overlap build/02_zero/zero1
# needs: build/02_zero/zero3 build/00_single_gpu/memory
. "$(dirname "$0")/tap.sh"
export OMP_NUM_THREADS=1
naive=$build/01_data_parallel/ddp_naive
zero3=$build/02_zero/zero3

# ---- the lesson ----

run "$zero3" --ranks 4
[ $? = 0 ] && [ "$(wc -l <"$out")" -ge 30 ] && [ "$(wc -l <"$out")" -le 48 ] &&
    [ "$(awk 'length > 108' "$out" | grep -vc '^PASS')" = 0 ]
report $? "zero3 prints $(wc -l <"$out") lines, none wider than 108 columns"
columns=$(grep -m 1 '^ .*one device .* formula$' "$out" | xargs)
[ "$columns" = "one device zero2 zero3 formula" ]
report $? "one device, the technique before, this one, and the formulas: $columns"
row() { sed -n "s/^  $1  *//p" "$out" | head -n 1 | sed 's/   */|/g'; }
[ "$(row 'optimizer state')" = '1.30 MB|325 kB|325 kB|325 kB' ] &&
    [ "$(row all_gather)" = '-|5 calls, 488 kB|8 calls, 829 kB|8 calls, 829 kB' ]
report $? "by kind of memory and of call: $(row all_gather)"
[ "$(grep -A 2 '^loss of step' "$out" | awk 'NR > 1 { print $(NF - 2), $(NF - 1), $NF }' | uniq | wc -l)" \
    = 1 ]
report $? "the losses beside those of one device"
! grep -qE 'predicted +[0-9]|worst tensor' "$out" && grep -qE '([0-9]+) of \1 counts as predicted' "$out"
report $? "counts that are equal are one number"
run "$zero3" --ranks 4 --verbose && [ "$(grep -c ' equal$' "$out")" -gt 30 ] &&
    grep -q '^With ignored labels' "$out"
report $? "--verbose shows every row, and the run with ignored labels"
run "$zero3" --ranks 2 --dry-run --model llama-3-8b --dtype bf16 --micro-batch 1 &&
    [ "$(row 'optimizer state')" = '96.4 GB|48.2 GB|48.2 GB|48.2 GB' ]
report $? "a dry run shows the same of a model that no laptop holds"

# ---- flags ----

for program in "$naive" "$zero3"; do
    run "$program" --help
    sections=$(sed -n '/^flags/,/^exit status/p' "$out" | grep -cE '^[a-z][^:]*$')
    flags=$(grep -oE '^  --[a-z-]+' "$out")
    name=$(basename "$program")
    [ "$sections" -ge 7 ] && ! grep -qE -- '^  --(tp|cp|pp|sp)$' <<<"$flags" &&
        [ -z "$(sort <<<"$flags" | uniq -d)" ]
    report $? "$name --help: $(wc -l <<<"$flags") flags in $sections groups, no other chapter's"
done

# Each flag that has a default, with its default.
given=$("$build/02_zero/zero1" --help | perl -0777 -ne 'while (/^  --(\S+)( .*?)(?=^ {0,2}\S|\z)/msg) {
    my ($flag, $text) = ($1, $2);
    $text =~ s/\s+/ /g;
    print "--$flag $1 " if $text =~ /default ([^),]+)\)/;
}')
run "$build/02_zero/zero1" $given --dry-run --no-check && [ "$(wc -w <<<"$given")" -gt 50 ]
report $? "zero1 takes each of the flags that it lists"

# ---- a failure ----

# fails NAME WORDS PROGRAM FLAGS…: in a copy of the tree with the bug NAME of tests/mutants, the program
# fails, and its last line has the words.
fails() {
    local bug=$1 words=$2 program=$3 tree=$work/$1
    shift 3
    wanted "$bug: $words" || return 0
    mkdir -p "$tree/build" && cp -a Makefile README.md common 0[0-9]_* tests "$tree" &&
        cp -a "$build"/lib "$build"/flags* "$build"/libultrascale.a "$build"/corpus.txt "$tree/build" &&
        tests/mutants/run --plant "$bug" "$tree" >"$work/plant" 2>&1 &&
        make -s -C "$tree" BUILD=build "build/$program" >>"$work/plant" 2>&1 || cat "$work/plant"
    run "$tree/build/$program" "$@"
    [ $? = 1 ] && tail -n 1 "$out" | grep -q "^FAIL ${program##*/}: .*$words"
    report $? "$bug: $words"
    rm -rf "$tree"
}
[ -n "${MUTANT+set}" ] || {  # who plants a bug has built one tree, and not another
    fails ddp_naive_averages_twice \
        'scale 0.25; 30 of 30 fail, all by this factor: usually averaged twice over the 4 ranks of dp' \
        01_data_parallel/ddp_naive --ranks 4 --grad-acc 3
    fails ddp_naive_scales_by_micro_batches \
        'scale 0.333333; .*: usually scaled twice by 1 / the 3 micro-batches' \
        01_data_parallel/ddp_naive --ranks 2 --grad-acc 3
}

# ---- terminals, logs and pipes ----

escape=$(printf '\033')
run "$naive" --ranks 2 && ! grep -qF -e "$escape" -e "$(printf '\r')" "$out"
report $? "no color and no bar in a log"
on_terminal "$naive --ranks 2 --layers 6" && grep -qF "$escape[32mPASS$escape[0m ddp_naive" "$out"
report $? "a green verdict on a terminal, through mpirun, too"
grep -qE '\[#+-*\] +[0-9]+%' "$out"
report $? "a bar while it works"
on_terminal "NO_COLOR=1 $naive --ranks 2" && grep -q '^PASS ddp_naive' "$out"
report $? "no color where NO_COLOR asks for none"
timeout 60 "$naive" --ranks 4 --steps 1000000 2>"$err" | head -n 1 >"$out"
[ ${PIPESTATUS[0]} = 141 ] && [ ! -s "$err" ] && [ "$(wc -l <"$out")" = 1 ]
report $? "output that nobody reads any more ends all ranks at once, without a word"
: >"$out"
timeout 60 "$naive" --ranks 2 --layers 1 --steps 1 >/dev/full 2>"$err"
one_line $? -F "ddp_naive: stdout could not be written whole: is the disk full?"
report $? "a disk that is full when ranks print"

# ---- files that would overwrite each other ----

echo 'a text' >"$work/text"
ULTRASCALE_DATA=$work/text refused "--json would overwrite $work/./text, which ULTRASCALE_DATA names" \
    01_data_parallel/ddp_naive --ranks 2 --json "$work/./text"
cp "$build/00_single_gpu/memory" "$work/memory"
build=$work refused "--json would overwrite this program, $work/memory" memory --json "$work/memory"
mkdir "$work/weights" && touch "$work"/weights/{model.safetensors,config.json}
refused "--json $work/weights/config.json would overwrite a part of a checkpoint" 00_single_gpu/memory \
    --json "$work/weights/config.json"
refused "--json $work/weights/model.safetensors would overwrite a part of a checkpoint" 00_single_gpu/memory \
    --json "$work/weights/model.safetensors"
refused "--json would overwrite $work/./text, which --data reads" 01_data_parallel/ddp_naive --ranks 2 \
    --data "$work/text" --json "$work/./text"
grep -qx 'a text' "$work/text"
report $? "the text is still there"
# The name of a model is no file, though a file may have this name.
wanted "a report may have the name of a model" &&
    run bash -c 'cd "$0" && exec "$1" --model llama-3-tiny --json llama-3-tiny' "$work" \
        "$PWD/$build/00_single_gpu/memory" && grep -q '"--json"' "$work/llama-3-tiny"
report $? "a report may have the name of a model"
refused "--trace and --json would write the same file" 01_data_parallel/ddp_naive --ranks 2 \
    --trace "$work/one" --json "$work/./one"
finish
