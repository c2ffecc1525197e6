// cuda_on_cpu_units.cc: what the machine code of a basic block computes. Arithmetic cannot be watched as
// accesses are, so it is read: objdump shows the function around a block, and what stands between the
// block's call of __sanitizer_cov_trace_pc and the next one's is its work. Optimisation moves no arithmetic
// across these calls, and -O1 makes no vectors. Whether g++ has fused a multiplication and an addition or
// not, it is two operations.
#include <unistd.h>

#include <unordered_map>

#include "cuda_on_cpu_inside.h"

static std::unordered_map<uint32_t, BlockWork> works;

// ---- instructions: x86-64 and AArch64 ----

struct Instruction {
    const char *name;  // without what x86-64 puts before (v) and after it (ss, sd)
    int flops, special;
};
static const Instruction instructions[] = {
    {"add", 1, 0},       {"sub", 1, 0},       {"mul", 1, 0},       {"max", 1, 0},       {"min", 1, 0},
    {"div", 0, 1},       {"sqrt", 0, 1},      {"fmadd132", 2, 0},  {"fmadd213", 2, 0},  {"fmadd231", 2, 0},
    {"fmsub132", 2, 0},  {"fmsub213", 2, 0},  {"fmsub231", 2, 0},  {"fnmadd132", 2, 0}, {"fnmadd213", 2, 0},
    {"fnmadd231", 2, 0}, {"fnmsub132", 2, 0}, {"fnmsub213", 2, 0}, {"fnmsub231", 2, 0},
};
static const Instruction instructions_arm[] = {
    {"fadd", 1, 0},   {"fsub", 1, 0},  {"fmul", 1, 0},  {"fnmul", 1, 0},  {"fmaxnm", 1, 0},
    {"fminnm", 1, 0}, {"fmadd", 2, 0}, {"fmsub", 2, 0}, {"fnmadd", 2, 0}, {"fnmsub", 2, 0},
    {"fmax", 1, 0},   {"fmin", 1, 0},  {"fdiv", 0, 1},  {"fsqrt", 0, 1},
};
// Calls of the C library, by what stands between < and the first of @, + and >.
static const Instruction calls[] = {
    {"fmaf", 2, 0},  {"fma", 2, 0},  {"fmaxf", 1, 0}, {"fmax", 1, 0}, {"fminf", 1, 0},  {"fmin", 1, 0},
    {"expf", 0, 1},  {"exp", 0, 1},  {"exp2f", 0, 1}, {"exp2", 0, 1}, {"logf", 0, 1},   {"log", 0, 1},
    {"log2f", 0, 1}, {"log2", 0, 1}, {"sinf", 0, 1},  {"cosf", 0, 1}, {"tanhf", 0, 1},  {"tanh", 0, 1},
    {"sqrtf", 0, 1}, {"sqrt", 0, 1}, {"powf", 0, 1},  {"erff", 0, 1}, {"expm1f", 0, 1},
};

template <int N>
static void look_up(const Instruction (&table)[N], const char *name, size_t length, BlockWork *work) {
    for (const Instruction &i : table)
        if (strlen(i.name) == length && strncmp(i.name, name, length) == 0) {
            work->flops += i.flops, work->special += i.special;
            work->flop_instructions += i.flops > 0, work->special_instructions += i.special > 0;
        }
}

// text: "vmulss %xmm0,%xmm1,%xmm2", "call 1050 <expf@plt>", "fmul s0, s1, s2"
static void read_instruction(const char *text, BlockWork *work) {
    size_t length = strcspn(text, " \t");
    const char *callee = strchr(text, '<');
    if (strncmp(text, "call", 4) == 0 || (length == 2 && strncmp(text, "bl", 2) == 0)) {
        if (callee) look_up(calls, callee + 1, strcspn(callee + 1, "@+>"), work);
        return;
    }
#ifdef __x86_64__
    if (length < 4 || text[length - 2] != 's' || (text[length - 1] != 's' && text[length - 1] != 'd'))
        return;
    int skip = text[0] == 'v';
    look_up(instructions, text + skip, length - 2 - (size_t)skip, work);
#else
    const char *operand = text + length + strspn(text + length, " \t");  // a vector's would begin with v
    if (*operand == 's' || *operand == 'd') look_up(instructions_arm, text, length, work);
#endif
}

// ---- functions ----

struct Function {
    uintptr_t address, start, end;  // of what is looked for, and of the function that has it
};

static void is_around(void *context, const char *, int type, uintptr_t value, size_t size) {
    Function *f = static_cast<Function *>(context);
    enum { FUNCTION = 2 };  // STT_FUNC
    if (type == FUNCTION && value <= f->address && f->address <= value + size)
        f->start = value, f->end = value + size;
}

// Lines of objdump: "    12ab:\tvmulss %xmm0,%xmm1,%xmm2". A block begins behind its call.
static void read_function(const Function &f) {
    char command[256], line[1024];
    snprintf(command, sizeof command,
             "objdump -d --no-show-raw-insn --start-address=0x%lx --stop-address=0x%lx /proc/%d/exe",
             f.start, f.end, (int)getpid());
    FILE *listing = popen(command, "r");
    CHECK(listing, "FLOPs are counted with objdump, which cannot be started");
    BlockWork *block = NULL;
    bool begins = false;
    while (fgets(line, sizeof line, listing)) {
        char *rest;
        unsigned long address = strtoul(line, &rest, 16);
        if (rest == line || *rest != ':') continue;
        if (begins) block = &works[(uint32_t)address];
        begins = strstr(rest, "<__sanitizer_cov_trace_pc") != NULL;
        rest += 1 + strspn(rest + 1, " \t");
        if (block && !begins) read_instruction(rest, block);
    }
    CHECK(pclose(listing) == 0,
          "FLOPs are counted with objdump (Debian's package binutils), which has failed");
}

const BlockWork &block_work(uint32_t site) {
    auto found = works.find(site);
    if (found != works.end()) return found->second;
    Function f = {site, 0, 0};
    each_symbol(is_around, &f);
    if (f.end) read_function(f);
    return works[site];  // of no function, such as one that was stripped: nothing
}
