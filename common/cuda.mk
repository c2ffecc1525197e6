# cuda.mk: how the CUDA sources are made. The Makefile reads it where OPS or COMM ask for it.
#
# OPS=cuda         *.cu through nvcc, for the GPUs of CUDA_ARCH and, as PTX of CUDA_PTX, for later ones
# OPS=cuda-on-cpu  the same files as C++ through g++ and cuda_on_cpu.h: for tests on machines without a GPU

# Sentences are for those who build; help, clean and the checks that choose OPS themselves go without.
building := $(filter-out help run test clean mutants gpu-check,$(or $(MAKECMDGOALS),help))
refuse    = $(if $(building),$(error $(1)))
first     = $(firstword $(wildcard $(1)))
# /usr/include is where the compiler looks anyhow, and must stay last in its list.
includes  = $(patsubst %,-isystem %/include,$(filter-out /usr,$(sort $(1))))

ifeq ($(origin CXX),default)
CXX := g++
endif
LINK := $(CXX)

CUDA_SOURCES := common/device_cuda.cu $(sort $(wildcard common/ops_cuda*.cu))

ifeq ($(OPS),cuda)
# ---- nvcc, and the libraries that come with it or apart from it ----
# nvcc itself knows where it stands, also behind a wrapper on PATH.
CUDA_HOME ?= $(or $(abspath $(shell nvcc -dryrun -x cu /dev/null 2>&1 | sed -n 's/^\#$$ TOP=//p')),/usr/local/cuda)
CUDA_HOME := $(CUDA_HOME)
NVCC      ?= $(CUDA_HOME)/bin/nvcc
CUDA_ARCH ?= 80 90a
CUDA_PTX  ?= 90
ifeq ($(call first,$(NVCC)),)
$(call refuse,OPS=cuda needs the CUDA Toolkit and there is no $(NVCC): install it or name its folder with CUDA_HOME=)
endif
# A Python package of cuBLAS or NCCL has include/ and lib/, and libraries under their version's name alone.
CUBLAS_HOME ?= $(CUDA_HOME)
library = $(call first,$(foreach home,$(1),$(foreach dir,lib64 lib targets/*/lib lib/x86_64-linux-gnu lib/aarch64-linux-gnu,\
          $(home)/$(dir)/$(2).so $(home)/$(dir)/$(2).so.[0-9]*)))
cudart   := $(call library,$(CUDA_HOME) /usr,libcudart)
cublasLt := $(call library,$(CUBLAS_HOME) /usr,libcublasLt)
ifeq ($(cudart),)
$(call refuse,OPS=cuda needs libcudart and $(CUDA_HOME) has none: name the toolkit's folder with CUDA_HOME=)
endif
ifeq ($(cublasLt),)
$(call refuse,OPS=cuda needs libcublasLt and $(CUBLAS_HOME) has none: name the folder that has lib/libcublasLt.so.* with CUBLAS_HOME=)
endif
gpu_libs := $(cudart) $(cublasLt)
CUDA_SOURCES += common/gemm_cublaslt.cu
NVCCFLAGS := -std=c++17 -O3 -lineinfo -ccbin $(CXX) -Xcompiler -Wall,-Wextra --Werror all-warnings -Icommon \
             $(call includes,$(filter-out $(CUDA_HOME),$(CUBLAS_HOME))) \
             $(foreach arch,$(CUDA_ARCH),-gencode arch=compute_$(arch),code=sm_$(arch)) \
             $(foreach arch,$(CUDA_PTX),-gencode arch=compute_$(arch),code=compute_$(arch))
# Of its own, so that builds that differ elsewhere can share what takes nvcc long.
KERNELS ?= $(BUILD)/lib
make_cu  = $(NVCC) $(NVCCFLAGS)
cu_name := nvcc
endif

ifeq ($(OPS),cuda-on-cpu)
# ---- the same files as C++ ----
# -fsanitize=thread has g++ report every access to memory; the runtime that it reports to is
# cuda_on_cpu.cc, which is compiled without it, and not ThreadSanitizer's, which is not linked.
CUDA_SOURCES += common/gemm_on_cpu.cc common/cuda_on_cpu.cc
ON_CPU_FLAGS := -std=c++17 -D_GNU_SOURCE $(OPT) -march=native -fno-math-errno -Wall -Wextra \
                -Wno-unknown-pragmas -g -Icommon $(BLAS_CFLAGS)
KERNELS      := $(BUILD)/lib
make_cu       = $(CXX) -x c++ $(ON_CPU_FLAGS) -fsanitize=thread
cu_name      := $(CXX)
LDLIBS       += -lboost_context
endif

ifeq ($(COMM),nccl)
# ---- NCCL ----
NCCL_HOME ?= $(or $(patsubst %/include/nccl.h,%,$(call first,$(addsuffix /include/nccl.h,$(CUDA_HOME) /usr /usr/local))),$(CUDA_HOME))
NCCL_HOME := $(NCCL_HOME)
ifeq ($(call first,$(NCCL_HOME)/include/nccl.h),)
$(call refuse,COMM=nccl needs NCCL and there is no $(NCCL_HOME)/include/nccl.h: install libnccl-dev or name the folder that has include/nccl.h with NCCL_HOME=)
endif
nccl := $(call library,$(NCCL_HOME) /usr,libnccl)
ifeq ($(nccl),)
$(call refuse,COMM=nccl needs libnccl and $(NCCL_HOME) has none: name the folder that has lib/libnccl.so.* with NCCL_HOME=)
endif
gpu_libs += $(nccl)
endif

ifeq ($(OPS),cuda)
CFLAGS += $(call includes,$(CUDA_HOME) $(NCCL_HOME))
endif
LDLIBS += $(gpu_libs) $(foreach dir,$(sort $(dir $(gpu_libs))),-Wl,-rpath,$(patsubst %/,%,$(dir))) -lstdc++

cuda_parts := $(CUDA_SOURCES:%=$(KERNELS)/%.o)
parts      += $(cuda_parts)

# ---- how they are made ----

$(KERNELS)/flags-cuda: FORCE
	@mkdir -p $(KERNELS)
	@echo '$(make_cu)' > $@.new
	@cmp -s $@.new $@ && rm $@.new || mv $@.new $@

$(KERNELS)/%.cu.o: %.cu $(KERNELS)/flags-cuda
	@mkdir -p $(@D)
	$(if $(V),,@echo '  $(cu_name)  $<';) $(make_cu) -MMD -MP -MF $(@:.o=.d) -c $< -o $@

$(BUILD)/lib/%.cc.o: %.cc $(BUILD)/flags
	@mkdir -p $(@D)
	$(if $(V),,@echo '  $(CXX)  $<';) $(CXX) $(ON_CPU_FLAGS) -MMD -MP -c $< -o $@

# Tests in C++. On the CPU they have kernels of their own, compiled as those of the back end are.
cc_tests := $(basename $(sort $(wildcard tests/test_*.cc)))
ifeq ($(OPS),cuda)
cc_tests := $(filter tests/test_ops_cuda,$(cc_tests))
endif
tests += $(cc_tests:%=$(BUILD)/%)

$(BUILD)/main/tests/%.cc.o: tests/%.cc $(KERNELS)/flags-cuda
	@mkdir -p $(@D)
	$(if $(V),,@echo '  $(CXX)  $<';) $(make_test) -MMD -MP -c $< -o $@
make_test = $(if $(filter cuda,$(OPS)),$(CXX) -std=c++17 $(OPT) -Wall -Wextra -g -Icommon $(call includes,$(CUDA_HOME)),$(make_cu))

# test_ops_cuda has both back ends in one program: those of kernels.h and device.h are renamed cuda_kernel_*
# and cuda_backend_* in copies of the objects, and the plain names are the CPU's.
both := $(cuda_parts:$(KERNELS)/%=$(BUILD)/both/%)

$(BUILD)/both/names: common/kernels.h common/device.h
	@mkdir -p $(@D)
	@grep -ohE '\b(kernel|backend)_[a-z_]+\(' $^ | tr -d '(' | sort -u | sed 's/.*/& cuda_&/' > $@

$(both): $(BUILD)/both/%: $(KERNELS)/% $(BUILD)/both/names
	@mkdir -p $(@D)
	@objcopy --redefine-syms=$(BUILD)/both/names $< $@

$(BUILD)/tests/test_ops_cuda: $(BUILD)/main/tests/test_ops_cuda.cc.o $(both) $(BUILD)/lib/common/ops_cpu.o \
                              $(BUILD)/lib/common/device_cpu.o $(archive)
	@mkdir -p $(@D)
	$(link) $(LINK) $(LDFLAGS) $^ -lcmocka $(LDLIBS) -o $@

$(filter-out %/test_ops_cuda,$(cc_tests:%=$(BUILD)/%)): $(BUILD)/tests/%: $(BUILD)/main/tests/%.cc.o $(archive)
	@mkdir -p $(@D)
	$(link) $(LINK) $(LDFLAGS) $^ -lcmocka $(LDLIBS) -o $@
