# cuda.mk: how the CUDA sources are built: the back end in common/cuda if OPS or COMM asks for it, and the
# chapters' own programs, 0*_*/*.cu, always.
#
# OPS=cuda         *.cu through nvcc: machine code for the GPUs of CUDA_ARCH, PTX of CUDA_PTX for later ones
# OPS=cuda-on-cpu  the same files as C++, through g++ and cuda_on_cpu.h, for tests on machines without a GPU
# OPS=cpu          only the chapters' programs, which launch kernels themselves, also as C++

# A build reports in one sentence what is missing; help, clean and the checks do not need it.
building := $(filter-out help run test mutants gpu-check clean,$(or $(MAKECMDGOALS),help))
refuse    = $(if $(building),$(error $(1)))
first     = $(firstword $(wildcard $(1)))
# Compilers search /usr/include anyway, and it must stay last in their list.
includes  = $(patsubst %,-isystem %/include,$(filter-out /usr,$(sort $(1))))
# Finds a library by its folder: toolkits have lib64/, Python packages lib/, with a version in the file name.
library   = $(call first,$(foreach home,$(1),$(foreach dir,lib64 lib targets/*/lib lib/$(MULTIARCH),\
            $(home)/$(dir)/$(2).so $(home)/$(dir)/$(2).so.[0-9]*)))

ifeq ($(origin CXX),default)
CXX := g++
endif
ifneq ($(OPS),cpu)
LINK := $(CXX)
cuda_sources := common/cuda/device_cuda.cu common/cuda/gemm_choices.cu common/cuda/gemm_cublaslt.cu \
                $(sort $(wildcard common/cuda/ops_cuda*.cu 07_kernels/book_*.cu))
endif
# The folder of the objects of *.cu: builds that differ otherwise may share it, since nvcc is slow. Under
# emulation they are compiled the same way everywhere, so builds that share the C objects share these too.
KERNELS ?= $(OBJECTS)/lib

ifeq ($(OPS),cuda)
# ---- nvcc ----
# Ask nvcc itself where its toolkit is: this works even if a wrapper is on the PATH.
CUDA_HOME   ?= $(or $(abspath \
    $(shell nvcc -dryrun -x cu /dev/null 2>&1 | sed -n 's/^\#$$ TOP=//p')),/usr/local/cuda)
CUDA_HOME   := $(CUDA_HOME)
CUBLAS_HOME ?= $(CUDA_HOME)
NVCC        ?= $(CUDA_HOME)/bin/nvcc
# The GPUs of this machine, of those that kernels are for, if nvcc knows them all. Otherwise A100, H100 and
# H200, and PTX, which later ones compile when a program starts: that takes minutes.
nvcc_knows  := $(patsubst compute_%,%,$(shell $(NVCC) --list-gpu-arch 2>/dev/null))
here        := $(filter-out 5% 6% 7%,$(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader \
               2>/dev/null | sed -n 's/^\([0-9]*\)\.\([0-9]\)$$/\1\2/p' | sort -u))
here        := $(if $(filter-out $(nvcc_knows),$(here)),,$(here))
CUDA_ARCH   ?= $(or $(here),80 90a)
CUDA_PTX    ?= $(if $(here),,90)
# TMA and wgmma are only in the code for 90a, which every GPU of capability 9.0 runs.
override CUDA_ARCH := $(patsubst 90,90a,$(CUDA_ARCH))
unknown     := $(filter-out $(nvcc_knows) $(nvcc_knows:%=%a) $(nvcc_knows:%=%f),$(CUDA_ARCH) $(CUDA_PTX))
nvcc_for    := $(shell $(NVCC) --version 2>/dev/null | sed -n 's/.* release \([0-9.]*\),.*/\1/p')
NVCC_OPT    ?= -O3 -lineinfo
cudart      := $(call library,$(CUDA_HOME) /usr,libcudart)
cublasLt    := $(call library,$(CUBLAS_HOME) $(if $(filter $(CUDA_HOME),$(CUBLAS_HOME)),/usr),libcublasLt)
ifneq ($(filter 5% 6% 7%,$(CUDA_ARCH) $(CUDA_PTX)),)
$(call refuse,CUDA_ARCH=$(CUDA_ARCH): kernels are for compute capability 8.0 (A100) and later; \
    `make` without OPS=cuda builds for the CPU)
endif
ifeq ($(call first,$(NVCC)),)
$(call refuse,OPS=cuda needs the CUDA Toolkit and there is no $(NVCC): \
    install it or name its folder with CUDA_HOME=)
endif
ifneq ($(filter 8.% 9.% 10.% 11.%,$(nvcc_for)),)
$(call refuse,OPS=cuda needs CUDA 12 or later and $(NVCC) is of $(nvcc_for): \
    name the folder of a later toolkit with CUDA_HOME=)
endif
ifneq ($(and $(nvcc_knows),$(unknown)),)
$(call refuse,CUDA_ARCH=$(CUDA_ARCH) CUDA_PTX=$(CUDA_PTX): this nvcc knows no $(unknown): \
    it knows $(nvcc_knows))
endif
ifeq ($(cudart),)
$(call refuse,OPS=cuda needs libcudart and $(CUDA_HOME) has none: name the toolkit's folder with CUDA_HOME=)
endif
ifeq ($(cublasLt),)
$(call refuse,OPS=cuda needs cuBLAS and $(CUBLAS_HOME) has no libcublasLt: \
    name the folder that has it in lib/ with CUBLAS_HOME=)
endif
cuda_libs    := $(cudart) $(cublasLt)
# -fmad=false: products and sums are fused only where the source says fma. Otherwise code for packs and for
# single elements, or of two kernels, may be fused in one and not in the other, and give other bits.
NVCCFLAGS    := -std=c++17 -fmad=false $(NVCC_OPT) -ccbin $(CXX) -Xcompiler -Wall,-Wextra -Icommon -I. \
                $(call includes,$(filter-out $(CUDA_HOME),$(CUBLAS_HOME))) \
                $(foreach arch,$(CUDA_ARCH),-gencode arch=compute_$(arch),code=sm_$(arch)) \
                $(foreach arch,$(CUDA_PTX),-gencode arch=compute_$(arch),code=compute_$(arch))
compile_cu   := $(NVCC) $(NVCCFLAGS) $(NVCC_SAYS)
compile_test := $(CXX) -std=c++17 $(OPT) -Wall -Wextra -g -Icommon -I. $(call includes,$(CUDA_HOME))
cc_tests     := $(sort $(wildcard tests/unit/test_ops_cuda*.cc))
# Set by a test that compiles without running: NVCC_SAYS for all, NVCC_BACK_END for common/, NVCC_KERNELS for
# chapter 07 and NVCC_BOOK for the parts that the back end uses, NVCC_OPT for host code and line numbers.
$(KERNELS)/common/%.o: private compile_cu += $(NVCC_BACK_END)
$(KERNELS)/07_kernels/%.o: private compile_cu += $(NVCC_KERNELS)
$(KERNELS)/07_kernels/book_%.cu.o: private compile_cu += $(NVCC_BOOK)
endif

ifneq ($(OPS),cuda)
# ---- g++ ---- -fsanitize=thread reports each memory access to cuda_on_cpu.cc, which is compiled without
# it. The sanitizer's own library is not linked. -fsanitize=bounds-strict finds indices beyond an array's
# declared bound, -fsanitize-coverage reports each basic block, for divergence, and -fstack-clash-protection
# makes an overflowing stack hit its guard page. -O1: above it g++ merges and splits accesses.
# -fno-tree-sink: whether g++ moves loads and arithmetic into the branch that needs them depends on its
# version, and the counts would too; so they stay where the kernels have them. -fno-plt: a call of expf in the
# machine code, from which FLOPs are counted, has its name with any linker. The emulator, which handles each
# access, is built with -O3; both ignore OPT, so that builds can share them.
emulator_sources  := $(sort $(wildcard common/cuda_on_cpu/cuda_on_cpu*.cc))
ON_CPU_FLAGS      := -std=c++17 -D_GNU_SOURCE -O3 $(NATIVE) -fno-math-errno -Wall -Wextra \
                     -Wno-unknown-pragmas -g1 '-fdebug-prefix-map=$(CURDIR)=.' -Icommon -I. $(BLAS_CFLAGS)
CUDA_ON_CPU_FLAGS := $(ON_CPU_FLAGS) -O1 -fno-tree-sink -fno-exceptions -fsanitize=thread \
                     -fsanitize=bounds-strict -fsanitize-coverage=trace-pc -fstack-clash-protection \
                     $(if $(filter x86_64%,$(MULTIARCH)),-fno-plt)
compile_cu        := $(CXX) -x c++ $(CUDA_ON_CPU_FLAGS)
fibers            := $(shell printf '\043include <boost/context/detail/fcontext.hpp>' | \
                     $(CXX) -fsyntax-only -x c++ - 2>/dev/null && echo yes)
endif

ifeq ($(OPS),cuda-on-cpu)
cuda_sources      += $(emulator_sources) $(sort $(wildcard tests/emulation/*.cc))
compile_test      := $(compile_cu)
cc_tests          := $(sort $(wildcard tests/unit/test_*.cc))
LDLIBS            += -lboost_context
endif

ifeq ($(OPS)-$(COMM),cuda-on-cpu-nccl)
cuda_sources += $(sort $(wildcard common/comm/comm_nccl*.cu))
endif

ifeq ($(OPS)-$(COMM),cuda-nccl)
# ---- NCCL ----
nccl_places := $(addsuffix /include/nccl.h,$(CUDA_HOME) /usr /usr/local)
NCCL_HOME   ?= $(or $(patsubst %/include/nccl.h,%,$(call first,$(nccl_places))),$(CUDA_HOME))
NCCL_HOME   := $(NCCL_HOME)
nccl        := $(call library,$(NCCL_HOME),libnccl)
ifeq ($(call first,$(NCCL_HOME)/include/nccl.h),)
$(call refuse,COMM=nccl needs NCCL and there is no $(NCCL_HOME)/include/nccl.h: \
    install libnccl-dev or name its folder with NCCL_HOME=)
endif
ifeq ($(nccl),)
$(call refuse,COMM=nccl needs NCCL and $(NCCL_HOME) has no libnccl: \
    name the folder that has it in lib/ with NCCL_HOME=)
endif
cuda_libs    += $(nccl)
cuda_sources += $(sort $(wildcard common/comm/comm_nccl*.cu))
$(KERNELS)/common/comm/comm_nccl%: private compile_cu += \
    $(call includes,$(filter-out $(CUDA_HOME),$(NCCL_HOME)))
endif

ifeq ($(OPS),cuda)
LDLIBS += $(cuda_libs) $(foreach dir,$(sort $(patsubst %/,%,$(dir $(cuda_libs)))),-Wl,-rpath,$(dir))
endif
cuda_parts := $(cuda_sources:%=$(KERNELS)/%.o)
parts      += $(cuda_parts)
cc_tests   := $(cc_tests:tests/unit/%.cc=$(BUILD)/tests/%)
tests      += $(cc_tests)
ifneq ($(filter-out $(BUILD)/lib $(OBJECTS)/lib,$(KERNELS)),)
-include $(shell find $(KERNELS) -name '*.d' 2>/dev/null)
endif

# ---- rules ----

cc_compile = $(if $(V),,@echo '  $(notdir $(firstword $(1)))  $<';) $(1) $(object)

$(KERNELS)/flags-cuda: FORCE
	$(call hold,$(subst $(CURDIR),.,$(compile_cu)))

$(KERNELS)/%.cu.o: %.cu $(KERNELS)/flags-cuda
	@mkdir -p $(@D)
	$(call cc_compile,$(compile_cu))

$(KERNELS)/%.cc.o: %.cc $(KERNELS)/flags-cuda
	@mkdir -p $(@D)
	$(call cc_compile,$(CXX) $(ON_CPU_FLAGS))

$(BUILD)/main/tests/%.cc.o: tests/%.cc $(KERNELS)/flags-cuda
	@mkdir -p $(@D)
	$(call cc_compile,$(compile_test))

# Tests of CUDA on the CPU do not depend on the back end's kernels: a change in its header would recompile
# them all.
cpu_parts := $(OBJECTS)/lib/common/tensor/ops_cpu.o $(OBJECTS)/lib/common/tensor/device_cpu.o
emulator  := $(filter %.cc.o,$(cuda_parts)) \
             $(filter $(OBJECTS)/lib/common/%.o,$(filter-out %.cu.o %.cc.o,$(parts))) $(cpu_parts)
$(BUILD)/libcuda_on_cpu.a: $(emulator)
	$(call archive_of,$^)

of_both   := $(filter $(BUILD)/tests/test_ops_cuda%,$(cc_tests))
$(filter-out $(of_both),$(cc_tests)): $(BUILD)/tests/%: $(BUILD)/main/tests/unit/%.cc.o \
    $(BUILD)/libcuda_on_cpu.a
	@mkdir -p $(@D)
	$(link) $(LINK) $(LDFLAGS) $^ -lcmocka $(LDLIBS) $(whole)

# test_ops_cuda* compare both back ends in one program: in copies of the CUDA objects, what kernels.h and
# device.h declare is named cuda_kernel_* and cuda_backend_*. The plain names are the CPU's.
both := $(cuda_parts:$(KERNELS)/%=$(BUILD)/both/%)

$(BUILD)/both/names: common/tensor/kernels.h common/tensor/device.h
	@mkdir -p $(@D)
	@grep -ohE '\b(kernel|backend)_[a-z_]+\(' $^ | tr -d '(' | sort -u | sed 's/.*/& cuda_&/' > $@

$(both): $(BUILD)/both/%: $(KERNELS)/% $(BUILD)/both/names
	@mkdir -p $(@D)
	@objcopy --redefine-syms=$(BUILD)/both/names $< $(part) && mv $(part) $@

$(of_both): $(BUILD)/tests/%: $(BUILD)/main/tests/unit/%.cc.o $(both) $(cpu_parts) $(archive)
	@mkdir -p $(@D)
	$(link) $(LINK) $(LDFLAGS) $^ -lcmocka $(LDLIBS) $(whole)

# ---- the chapters' programs in CUDA: main, archive, and where there is no GPU the emulator ----
# They are built for GPUs, and for the emulator only in the usual build. A build with sanitizers leaves them
# out, as the emulator takes the place of one, and so does a build on a machine without Boost.Context.
ifneq ($(filter cuda-nccl cuda-mpi cpu-mpiyes,$(OPS)-$(COMM)$(if $(SANITIZE),,$(fibers))),)
cu_programs := $(patsubst %.cu,$(BUILD)/%,$(shell grep -lE '^int main\b' /dev/null \
    $(sort $(wildcard $(CHAPTERS)_*/*.cu))))
programs    += $(cu_programs)
endif
cu_emulator := $(if $(filter cpu,$(OPS)),$(emulator_sources:%=$(KERNELS)/%.o))

$(cu_programs): $(BUILD)/%: $(KERNELS)/%.cu.o $(cu_emulator) $(archive)
	@mkdir -p $(@D)
	$(link) $(CXX) $(LDFLAGS) $^ $(LDLIBS) $(if $(filter cpu,$(OPS)),-lboost_context) $(whole)
