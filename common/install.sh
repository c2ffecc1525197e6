#!/bin/sh
# install.sh run|test [GOALS]: what `make run` or `make test` needs and this machine lacks, it names and
# installs with apt-get; where it may not, it prints the command and stops. Libraries are looked for by
# file, so that copies which no package installed count too. GOALS: what make was asked for, if not that.

needed='' optional=''
need() { "$2" "$3" >/dev/null 2>&1 || needed="$needed $1"; }  # need PACKAGE by FILE
want() { "$2" "$3" >/dev/null 2>&1 || optional="$optional $1"; }
program() { command -v "$1"; }
file() { for found in $1; do test -e "$found" && return; done; false; }
fuzzer() { echo 'int LLVMFuzzerTestOneInput(void); int LLVMFuzzerTestOneInput(void) { return 0; }' |
    clang -fsanitize=fuzzer,address -L"$(dirname "$(gcc -print-file-name=libstdc++.so)")" \
        -x c - -o /dev/null; }

need gcc program gcc
need libc6-dev file /usr/include/stdio.h
need libopenblas-openmp-dev file '/usr/lib/*/openblas-openmp/libopenblas.so'
need libcjson-dev file /usr/include/cjson/cJSON.h
need librandom123-dev file /usr/include/Random123/philox.h
need libopenmpi-dev program mpicc
need openmpi-bin program mpirun
# For the CUDA programs on the CPU.
need g++ program g++
need binutils program objdump
need libboost-context-dev file '/usr/include/boost/context/*'
if [ "$1" = test ]; then
    need libcmocka-dev file /usr/include/cmocka.h
    need perl program prove
    need python3 program python3
    # Without these, the checks that need them are left out by name.
    want clang program clang
    want iproute2 program ip
    want libomp-dev file '/usr/lib/llvm-*/lib/libomp.so'
    # Some releases ship clang's sanitizers apart from clang.
    if apt-cache show libclang-rt-dev >/dev/null 2>&1; then want libclang-rt-dev fuzzer -; fi
fi
packages=$(echo $needed $optional)
[ -n "$packages" ] || exit 0

install="apt-get install -y --no-install-recommends $packages"
as_root=''
if [ "$(id -u)" != 0 ]; then
    if sudo -n true 2>/dev/null; then as_root='sudo -n'
    elif [ -t 0 ] && program sudo >/dev/null; then as_root='sudo'
    else as_root='none'; fi
fi
echo "make ${2:-$1} needs packages that this machine lacks: $packages"
if [ "$as_root" != none ] && program apt-get >/dev/null; then
    echo "installing them: $as_root $install"
    get="$as_root env DEBIAN_FRONTEND=noninteractive"  # sudo passes no variables on
    # Package lists may be missing or old; where one of them cannot be had, the others may be enough.
    $get apt-get update -q
    $get $install && exit 0
fi
[ -n "$needed" ] || { echo "going on without: $(echo $optional)"; exit 0; }
echo "They could not be installed from here. As root, this does it:" >&2
echo "    $install" >&2
exit 2
