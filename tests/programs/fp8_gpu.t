#!/bin/bash
# fp8_gpu.t: fp8 on emulated GPUs, where cuBLASLt multiplies 8-bit codes or, with block scales, chapter 07's
# kernel, compared with the CPU: losses, and the first step's gradient. TAP.
#
# How far apart they may be. In f32: its noise, some 2^-20, moves one of 2^16 numbers to the next code, a
# step of 2^-4, while the recipe itself, against f64 without codes, has every number off by up to half a
# step. So the difference is sqrt(12 / 2^16) = 0.0136 of the recipe's own error. In bf16: 4 times the error
# of the CPU's bf16, with f64 as the reference.
# needs: OPS=cuda-on-cpu BUILD=build-cuda-on-cpu OBJECTS=build build-cuda-on-cpu/08_mixed_precision/fp8
. "$(dirname "$0")/tap.sh"
export OMP_NUM_THREADS=1
needs_fibers
builds OPS=cuda-on-cpu BUILD=build-cuda-on-cpu OBJECTS=build build-cuda-on-cpu/08_mixed_precision/fp8
cpu=build-cuda-on-cpu/cpu  # the CPU's program, from the same objects, however build/ is linked
builds OPS=cpu BUILD=$cpu OBJECTS=build $cpu/08_mixed_precision/fp8

head -c 350 LICENSE >"$work/text"

# trained RUN BUILD FLAGS…
trained() {
    rm -rf "${work:?}/$1"
    run "$2/08_mixed_precision/fp8" --no-check --ranks 1 --layers 1 --clip 0 --sample 0 --eval-every 0 \
        --data "$work/text" --save "$work/$1" --save-every 1 --json "$work/$1.json" "${@:3}"
    [ -e "$work/$1/step-000001" ]  # only for the comparison: held-out losses need not fall
}

cat >"$work/compare" <<'END'
use strict;
my ($what, $most, @runs) = @ARGV;
sub slurp { local (@ARGV, $/) = shift; binmode ARGV; scalar <> }
sub bf16 { unpack 'f<*', pack 'L<*', map { $_ << 16 } unpack 'S<*', shift }
sub numbers {    # the losses, or the weights after the first step
    my $run = shift;
    return split /,\s*/, (slurp("$run.json") =~ /"loss":\s*\[([^\]]*)\]/)[0] if $what eq 'losses';
    my $file = slurp("$run/step-000001/model.safetensors");
    my $start = 8 + unpack 'Q<', $file;
    my ($header, $data) = (substr($file, 8, $start - 8), substr $file, $start);
    return $header =~ /"BF16"/ ? bf16($data) : unpack $header =~ /"F64"/ ? 'd<*' : 'f<*', $data;
}
sub distance { my ($x, $y) = @_; my $s = 0; $s += ($x->[$_] - $y->[$_])**2 for 0 .. $#$x; sqrt $s }
my ($gpu, $right, $other) = map { [numbers($_)] } @runs;
my ($error, $its) = (distance($gpu, $right), distance($other, $right));
printf "FAIL unless below %g: %s are off by %.2g, %.2g of the other's\n", $most, $what, $error,
    $error / $its;
exit !(@$gpu == @$right && @$other == @$right && $error > 0 && $error <= $most * $its);
END
compare() { run perl "$work/compare" "$1" "$2" "$work/gpu" "$work/right" "$work/other"; }

# served RECIPE FLAGS…: trained on the GPU, by a fast kernel.
served() { trained gpu build-cuda-on-cpu --fp8 "$@" && ! grep -q 'plain kernel' "$out"; }

for recipe in te-current te-delayed; do
    wanted "$recipe, by cuBLASLt" || continue
    steps="--steps 3 --lr 0.1"
    trained other $cpu --dtype f64 --fp8 none $steps &&
        trained right $cpu --dtype f64 --fp8 $recipe $steps &&
        served $recipe --dtype f32 $steps && compare losses 0.0136 && compare weights 0.0136
    report $? "$recipe, by cuBLASLt"
done
if wanted "deepseek, by the book's kernel"; then
    # a step so large that the weights after it are the gradient; sizes end within a tile of 128
    shape="--steps 1 --lr 1000 --grad-acc 1 --micro-batch 1 --seq 16"
    trained other $cpu --dtype bf16 --fp8 deepseek $shape &&
        trained right $cpu --dtype f64 --fp8 deepseek $shape &&
        served deepseek --dtype bf16 $shape && compare weights 4
    report $? "deepseek, by the book's kernel"
fi
trained odd build-cuda-on-cpu --dtype f32 --fp8 te-current --steps 1 --ffn 72 &&
    [ "$(grep -c 'plain kernel.*cuBLASLt wants sizes that are multiples of 16' "$out")" = 1 ]
report $? "sizes that are no multiples of 16 are served, and said once"
finish
