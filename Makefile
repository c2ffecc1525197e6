# ultrascale.c: `make run` takes the tour, `make test` checks everything; `make help` lists the rest.
#
# Every 0*_*/*.c with a main becomes build/<chapter>/<name>. Its other functions, compiled a second time
# with -DNO_MAIN, go with common/*.c into one archive, from which programs and tests take what they call.
#
# The back ends for computation (OPS) and for communication (COMM) are chosen here, by linking; the chapters
# do not depend on the choice.
OPS  ?= cpu
COMM ?= mpi
# the choices that exist, and the folder of each
folder-cpu-mpi         := build
folder-cuda-nccl       := build-cuda
folder-cuda-mpi        := build-cuda-mpi
folder-cuda-on-cpu-mpi := build-cuda-on-cpu
folder-cuda-on-cpu-nccl := build-nccl-on-cpu
BUILD ?= $(folder-$(OPS)-$(COMM))
ifeq ($(folder-$(OPS)-$(COMM)),)
$(error OPS=$(OPS) COMM=$(COMM): OPS is cpu, cuda or cuda-on-cpu, COMM is mpi, or nccl but with OPS=cpu)
endif
ifneq ($(words $(BUILD)),1)
$(error BUILD=$(BUILD): BUILD is a folder without a space in its name; unset, it is $(folder-$(OPS)-$(COMM)))
endif
# C files of common/ that only one choice needs; common/cuda/cuda.mk adds the others
of-cpu  := common/tensor/device_cpu.c common/tensor/ops_cpu.c common/tensor/kernel_table_cpu.c
of-mpi  := $(wildcard common/comm/comm_mpi*.c) common/comm/comm_staged.c
of-nccl :=

ifeq ($(origin CC),default)
CC := gcc
endif
# On a processor with AVX10, gcc 15 warns about -mavx10.1, to which it expands -march=native itself. Then the
# other flags of that expansion, including those for AVX-512, replace -march=native.
NATIVE := $(strip $(shell LC_ALL=C $(CC) -v -march=native -fsyntax-only -x c /dev/null 2>&1 | awk ' \
    / warning: .*-mavx10/ { warned = 1 } \
    /\/cc1 / { for (i = 1; i <= NF; i++) if ($$i ~ /^-m/ && $$i !~ /avx10/) flags = flags " " $$i } \
    END { print warned ? flags : "-march=native" }'))
LINK  := $(CC)
OPT   ?= -O3
# Each unit test runs for a moment: optimizing it would take longer than it gains.
TEST_OPT ?= $(if $(SANITIZE),-O0,-O1)
# SANITIZE=address,undefined builds with sanitizers; choose another BUILD with it.
SANITIZE ?=

# If tests cannot be compiled, `make all` and `make tests` install the same packages as `make test`: here,
# before mpicc is queried and any file is compiled.
ifneq ($(filter all tests,$(MAKECMDGOALS)),)
ifeq ($(findstring n,$(filter-out --%,$(firstword -$(MAKEFLAGS)))),)
ifneq ($(shell $(CC) $(CFLAGS_EXTRA) -E -include cmocka.h -x c /dev/null >/dev/null 2>&1 || \
    common/install.sh test '$(MAKECMDGOALS)' >&2 || echo failed),)
$(error the packages that tests need are not installed)
endif
endif
endif

# The OpenMP build of OpenBLAS, on purpose: Debian's default has its own thread pool, and two pools that
# compete for the same cores make everything four to ten times slower.
MULTIARCH   := $(shell $(CC) -print-multiarch 2>/dev/null || gcc -print-multiarch 2>/dev/null)
BLAS_LIBDIR ?= /usr/lib/$(MULTIARCH)/openblas-openmp
BLAS_CFLAGS ?= -I/usr/include/$(MULTIARCH)/openblas-openmp
BLAS_LIBS   ?= -L$(BLAS_LIBDIR) -Wl,-rpath,$(BLAS_LIBDIR) -lopenblas

# Open MPI; on systems where pkg-config does not know it, mpicc says where it is.
MPI_CFLAGS ?= $(shell mpicc --showme:compile 2>/dev/null || pkg-config --cflags ompi-c 2>/dev/null)
MPI_LIBS   ?= $(shell mpicc --showme:link 2>/dev/null || pkg-config --libs ompi-c 2>/dev/null)
MPI_CFLAGS := $(MPI_CFLAGS)
MPI_LIBS   := $(MPI_LIBS)

WARNINGS := -Wall -Wextra -Wmissing-prototypes
ifneq ($(findstring clang,$(CC)),)
# An `omp simd` loop that clang leaves scalar is slower, not wrong.
WARNINGS += -Wno-pass-failed
else
# Makes gcc clear the upper halves of AVX registers before calls even below -O2. Otherwise libm's exp() and
# log(), which are SSE code, take five times as long.
CLEAR_AVX := -fexpensive-optimizations
endif
ifeq ($(origin CFLAGS),command line)
$(error CFLAGS would replace flags that the sources need: CFLAGS_EXTRA=$(CFLAGS) adds to them)
endif
# -fno-math-errno changes no value: sqrt, whose errno nothing reads, may become vector code, and AdamW is
# twice as fast. -g1 records functions and lines, in a fraction of -g's time and space; CFLAGS_EXTRA=-g adds
# variables for gdb.
CFLAGS   := -std=c11 -D_GNU_SOURCE $(OPT) $(CLEAR_AVX) $(NATIVE) -fno-math-errno -fopenmp \
            $(WARNINGS) -g1 -Icommon -I. $(BLAS_CFLAGS) $(MPI_CFLAGS)
LDFLAGS  := -fopenmp $(LDFLAGS_EXTRA)
LDLIBS   := -lcjson $(BLAS_LIBS) $(MPI_LIBS) -lm
ifneq ($(SANITIZE),)
CFLAGS  += -fsanitize=$(SANITIZE) -fno-sanitize-recover=all -fno-omit-frame-pointer
LDFLAGS += -fsanitize=$(SANITIZE)
endif
ALL_CFLAGS = $(CFLAGS) $(CFLAGS_EXTRA)

# CHAPTERS=0[0-5] leaves out later chapters, for a build that does not need them
CHAPTERS        ?= 0*
chapter_sources := $(sort $(wildcard $(CHAPTERS)_*/*.c))
common_sources  := $(filter-out $(of-cpu) $(of-mpi),$(sort $(wildcard common/*.c common/*/*.c))) \
                   $(of-$(OPS)) $(of-$(COMM))
test_sources    := $(sort $(wildcard tests/unit/test_*.c))
fuzz_sources    := $(sort $(wildcard tests/fuzz/fuzz_*.c))
bench_sources   := $(sort $(wildcard tests/bench/bench*.c))

with_main := $(if $(chapter_sources),$(shell grep -lE '^int main\b' $(chapter_sources)))
# Builds with the same flags for C may share the C objects, and differ in what they link.
OBJECTS   ?= $(BUILD)
programs  := $(with_main:%.c=$(BUILD)/%)
tests     := $(test_sources:tests/unit/%.c=$(BUILD)/tests/%)
fuzzers   := $(fuzz_sources:tests/fuzz/%.c=$(BUILD)/tests/%)
# Everything that the fuzzed parsers call.
fuzzed    := $(addprefix common/,base files host report/svg tensor/dtype tensor/rng train/data \
             train/safetensors) \
             $(addprefix 05_pipeline_parallel/,schedule schedule_clock schedule_picture schedule_text \
             schedule_verify)
benches   := $(bench_sources:tests/bench/%.c=$(BUILD)/tests/%)
parts     := $(common_sources:%.c=$(OBJECTS)/lib/%.o) $(chapter_sources:%.c=$(OBJECTS)/lib/%.o)
archive   := $(BUILD)/libultrascale.a
corpus    := $(BUILD)/corpus.txt

# V=1 shows the whole commands.
ifeq ($(V),)
Q := @
compile = @echo '  $(CC)  $<';
link    = @echo '  link  $@';
endif
# An output gets its name last, or make would take that of an interrupted command for up to date. Two makes
# at once do not write the same file: $$ is the shell's process number.
part       = $@.$$$$.part
whole      = -o $(part) && mv $(part) $@
# What is compiled, and in a file beside it what it was compiled from. -fsyntax-only writes no object.
object     = -MMD -MP -MF $(@:.o=.d) -MT $@ -c $< \
             $(if $(findstring -fsyntax-only,$(CFLAGS_EXTRA)),-o $@,$(whole))
archive_of = $(Q)ar rcs $(part) $(1) && mv $(part) $@
# Keeps a command line in a file, so that a different one rebuilds everything that depends on it. If several
# makes run at once, as in tests, none removes the file under another.
hold = @mkdir -p $(@D); echo '$(1)' | cmp -s - $@ || echo '$(1)' > $@

include common/cuda/cuda.mk

.DEFAULT_GOAL := help
.PHONY: help run test matrix recipes faults threads gpu-check bench bench-collectives readme all objects flags \
        programs tests fuzzers clean mutants FORCE exercises hint grade hunt hunt-answer course-commands
.DELETE_ON_ERROR:
.SECONDARY:

help:
	@echo 'make run        install what is missing, build, and take the tour: every program on the small model'
	@echo 'make test       everything that CI checks: unit and shell tests, sanitizers, clang, fuzzing, a'
	@echo '                sample of the mutants;'
	@echo '                with GUARD=1 all tests run on guarded device memory (common/tensor/guard.h)'
	@echo 'make gpu-check  the tests on a GPU, and what is reached there; PART=suite: one part, of under 10'
	@echo '                minutes'
	@echo 'make matrix     every combination of techniques on up to 8 ranks, and some on 12 and 16: proven, or'
	@echo '                refused with a sentence; MATRIX=3/20: a part; goes on where it was broken off'
	@echo 'make recipes    every FP8 recipe with each axis, stage of ZeRO, recomputation and resumption'
	@echo 'make faults     1,000 runs in which a rank, a launcher or a disk fails, and how each kind ended;'
	@echo '                N=40 SEED=2: others'
	@echo 'make threads    programs of many ranks under ThreadSanitizer'
	@echo 'make bench      the figures of merit of this machine, each beside its target: a table per chapter,'
	@echo '                5 minutes; make bench-collectives: collectives beside MPI'"'"'s own, 1 kB to 64 MB'
	@echo 'make flags      what gcc needs to build your own program against $(archive), on one line'
	@echo '                (00_single_gpu/README.md)'
	@echo 'make all        programs and tests, not run; make programs, make tests: one of the two'
	@echo 'make mutants    plants each known bug in a copy, and demands that a test turns red; M=zero3: those'
	@echo '                of that name'
	@echo 'make readme     runs what the README shows, and writes its figures anew'
	@echo 'make exercises  functions of the chapters to write anew (tests/course/README.md);'
	@echo '                make grade X=zero3 proves one, FROM=dir a class; make hint X=zero3'
	@echo 'make hunt N=12  plants a bug and shows its symptoms; make hunt-answer N=12 AT=file.c:LINE'
	@echo 'make clean      removes build/, but not build/exercises/, and build-*/'
	@echo
	@echo 'Variables: V=1 CC=clang BUILD=build-x OPT=-O1 SANITIZE=address,undefined CFLAGS_EXTRA=...'
	@echo
	@echo 'OPS=cuda COMM=nccl    for GPUs; with COMM=mpi what ranks send goes through the host'
	@echo 'OPS=cuda-on-cpu       the CUDA kernels on the CPU, for tests'
	@echo 'CUDA_HOME NCCL_HOME CUBLAS_HOME    folders with include/ and lib/ where they are not found'
	@echo 'CUDA_ARCH="80 90a"    kinds of GPUs, by default those of this machine; CUDA_PTX=90: for later ones,'
	@echo '                compiled when a program starts'

run:
	@common/install.sh run
	@echo '== building every program in $(BUILD)/; the tour follows'
	@$(MAKE) --no-print-directory -j$$(nproc) programs
	@common/report/tour.sh $(BUILD)

test:
	@common/install.sh test
	@tests/run

bench:
	@common/install.sh test
	@$(MAKE) --no-print-directory $(benches) $(corpus)
	@BUILD=$(BUILD) tests/bench/run

# The whole sweep: two minutes.
bench-collectives: $(BUILD)/tests/bench_comm
	@for ranks in 2 4 8; do $(BUILD)/tests/bench_comm --ranks $$ranks --sweep || exit 1; done

matrix: $(BUILD)/08_mixed_precision/matrix $(corpus)
	@tests/matrix $(or $(MATRIX),1/1)

recipes: $(BUILD)/08_mixed_precision/fp8 $(corpus)
	@tests/recipes

faults: $(BUILD)/01_data_parallel/ddp_bucketed $(BUILD)/08_mixed_precision/train_5d $(corpus)
	@tests/faults $(or $(N),1000) $(or $(SEED),1)

threads:
	@tests/programs/threads.t

gpu-check:
	@tests/gpu-check $(PART)

mutants:
	@set -f; tests/mutants/run $(M)

exercises:
	@tests/course/course stubs '$(or $(TO),build/exercises)'
hint:
	@tests/course/course hint $(X)
grade:
	@common/install.sh test
	@BUILD=$(BUILD) tests/course/course grade $(if $(FROM),--from '$(FROM)') \
	    $(if $(JSON),--json '$(JSON)') $(X)
hunt:
	@common/install.sh test
	@BUILD=$(BUILD) tests/course/course hunt $(N)
hunt-answer:
	@BUILD=$(BUILD) tests/course/course answer $(N) $(AT)
# Prints on one line what the compiler needs to build a file outside this tree against the archive.
flags:
	$(if $(findstring ',$(CURDIR))$(word 2,$(CURDIR)),$(error make flags: $(CURDIR) has a space or a quote, \
	    which flags on one line cannot hold))
	@echo '$(strip -I$(CURDIR)/common -I$(CURDIR) $(filter-out -Icommon -I.,$(ALL_CFLAGS)) $(abspath $(archive)) \
	    $(LDFLAGS) $(LDLIBS))'
# Prints how the file of an exercise is compiled and linked.
course-commands:
	@echo 'compile $(CC) $(ALL_CFLAGS)'
	@echo 'link $(LINK) $(LDFLAGS)'
	@echo 'libraries $(LDLIBS)'
ifneq ($(cu_programs),)
	@echo 'compile-cu $(compile_cu)'
	@echo 'link-cu $(CXX) $(LDFLAGS) $(cu_emulator)'
	@echo 'libraries-cu $(LDLIBS) $(if $(filter cpu,$(OPS)),-lboost_context)'
endif

readme: programs $(benches)
	@BUILD=$(BUILD) common/report/readme.sh

all: programs tests
# Compiles each file once for the warnings, with its main if it has one.
objects: $(filter-out $(with_main:%.c=$(OBJECTS)/lib/%.o),$(parts)) $(with_main:%.c=$(OBJECTS)/main/%.o) \
         $(test_sources:%.c=$(OBJECTS)/main/%.o)
programs: $(programs) $(corpus)
tests: $(tests) $(corpus)
fuzzers: $(fuzzers)

# Keeps what students have written.
clean:
	[ ! -d build ] || find build/ -mindepth 1 -maxdepth 1 ! -name exercises -exec rm -rf {} +
	find . -maxdepth 1 -type d -name 'build-*' -exec rm -rf {} +

# ---- how things are built ----

$(OBJECTS)/flags: FORCE
	$(call hold,$(CC) $(ALL_CFLAGS))
$(BUILD)/flags-link: FORCE
	$(call hold,$(LINK) $(LDFLAGS) $(LDLIBS))
FORCE:

$(OBJECTS)/lib/%.o: %.c $(OBJECTS)/flags
	@mkdir -p $(@D)
	$(compile) $(CC) $(ALL_CFLAGS) -DNO_MAIN $(object)

$(OBJECTS)/main/%.o: %.c $(OBJECTS)/flags
	@mkdir -p $(@D)
	$(compile) $(CC) $(ALL_CFLAGS) $(object)

$(OBJECTS)/main/tests/unit/%.o: private CFLAGS += $(TEST_OPT)

$(archive): $(parts) $(BUILD)/flags-link
	$(call archive_of,$(parts))

$(filter-out $(cu_programs),$(programs)): $(BUILD)/%: $(OBJECTS)/main/%.o $(archive)
	@mkdir -p $(@D)
	$(link) $(LINK) $(LDFLAGS) $^ $(LDLIBS) $(whole)

# clang's own OpenMP, which OpenBLAS would start, leaks. The fuzzer is C++, and clang looks for the C++
# library next to the newest gcc, of which perhaps only the Fortran compiler is installed.
$(BUILD)/tests/fuzz_%: $(OBJECTS)/main/tests/fuzz/fuzz_%.o $(fuzzed:%=$(OBJECTS)/lib/%.o)
	@mkdir -p $(@D)
	$(link) $(LINK) $(patsubst -fopenmp,-fopenmp=libgomp,$(LDFLAGS)) -fsanitize=fuzzer $^ $(LDLIBS) \
	    -L$(dir $(shell gcc -print-file-name=libstdc++.so)) $(whole)

$(benches): $(BUILD)/tests/%: $(OBJECTS)/main/tests/bench/%.o $(archive)
	@mkdir -p $(@D)
	$(link) $(LINK) $(LDFLAGS) $^ $(LDLIBS) $(whole)

$(BUILD)/tests/test_%: $(OBJECTS)/main/tests/unit/test_%.o $(archive)
	@mkdir -p $(@D)
	$(link) $(LINK) $(LDFLAGS) $^ -lcmocka $(LDLIBS) $(whole)

# Whoever makes a single program wants to run it. (A mutant's sources are no reason to make the text anew.)
$(programs): | $(if $(wildcard $(corpus)),,$(corpus))

# The text that the model reads by default: this book itself. A run that has mapped it keeps the old one.
$(corpus): $(sort $(wildcard README.md 0*_*/*.c common/*.h common/*.c common/*/*.h common/*/*.c \
    tests/unit/*.c))
	@mkdir -p $(@D)
	@cat $^ > $(part) && mv $(part) $@

-include $(shell find $(foreach dir,$(sort $(BUILD) $(OBJECTS)),$(dir)/lib $(dir)/main) -name '*.d' \
    2>/dev/null)
