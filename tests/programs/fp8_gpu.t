#!/bin/bash
# fp8_gpu.t: fp8 on emulated GPUs, where 8-bit codes are cuBLASLt's, beside the CPU: the losses of three
# steps, and the first step's gradient. TAP.
#
# How far apart they may be: f32's noise, some 2^-20, moves one of 2^16 numbers to the next code, a step of
# 2^-4, while the recipe itself, against f64 without codes, has every number off by up to half a step. So of
# the recipe's own error the difference is sqrt(12 / 2^16), 2^-6. The CPU's run is in f64, but for codes.
# needs: OPS=cuda-on-cpu BUILD=build-cuda-on-cpu build-cuda-on-cpu/08_mixed_precision/fp8
. "$(dirname "$0")/tap.sh"
export OMP_NUM_THREADS=1
needs_fibers
builds OPS=cuda-on-cpu BUILD=build-cuda-on-cpu build-cuda-on-cpu/08_mixed_precision/fp8
builds OPS=cpu BUILD=build build/08_mixed_precision/fp8

# trained RUN BUILD FLAGS…
trained() {
    run "$2/08_mixed_precision/fp8" --no-check --ranks 1 --layers 1 --steps 3 --clip 0 --lr 0.1 --sample 0 \
        --eval-every 0 --data LICENSE --save "$work/$1" --save-every 1 --json "$work/$1.json" "${@:3}"
}

cat >"$work/compare" <<'END'
use strict;
my ($what, @runs) = @ARGV;
sub slurp { local (@ARGV, $/) = shift; binmode ARGV; scalar <> }
sub numbers {    # the losses, or the weights behind the first step
    my $run = shift;
    return split /,\s*/, (slurp("$run.json") =~ /"loss":\s*\[([^\]]*)\]/)[0] if $what eq 'losses';
    my $file = slurp("$run/step-000001/model.safetensors");
    my $header = unpack 'Q<', $file;
    return unpack substr($file, 8, $header) =~ /"F64"/ ? 'd<*' : 'f<*', substr $file, 8 + $header;
}
my ($gpu, $cpu, $wide) = map { [numbers($_)] } @runs;
sub distance { my ($x, $y) = @_; my $s = 0; $s += ($x->[$_] - $y->[$_])**2 for 0 .. $#$x; sqrt $s }
my ($error, $recipe) = (distance($gpu, $cpu), distance($cpu, $wide));
printf "%s: off by %.1e of the recipe's own error\n", $what, $error / $recipe;
exit !(@$gpu == @$cpu && @$cpu > 2 && $error > 0 && $error <= 2**-6 * $recipe);
END
same() { run perl "$work/compare" "$1" "$work/gpu" "$work/cpu" "$work/wide"; }

# beside NAME RECIPE FLAGS…: one recipe, whose sizes a fast kernel serves.
beside() {
    local name=$1 recipe=$2
    shift 2
    wanted "$name" || return 0
    rm -rf "$work"/{wide,cpu,gpu}
    trained wide build --dtype f64 --fp8 none "$@" && trained cpu build --dtype f64 --fp8 "$recipe" "$@" &&
        trained gpu build-cuda-on-cpu --dtype f32 --fp8 "$recipe" "$@" && ! grep 'plain kernel' "$out" &&
        same losses && same weights
    report $? "$name"
}
beside "te-current" te-current
beside "te-delayed" te-delayed
trained odd build-cuda-on-cpu --dtype f32 --fp8 te-current --ffn 72 &&
    [ "$(grep -c 'plain kernel.*cuBLASLt wants sizes that are multiples of 16' "$out")" = 1 ]
report $? "sizes that are no multiples of 16 are served, and said once"
finish
