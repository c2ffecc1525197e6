// cuda_on_cpu_units.cc: what the machine code of a basic block computes. Arithmetic cannot be intercepted
// as accesses are, so the code is read: objdump shows the function around a block, and whatever can be
// reached from the block's call of __sanitizer_cov_trace_pc without passing another such call is its work.
// It need not be contiguous: if a block checks a bound, g++ may put the rest elsewhere. Optimisation moves
// no arithmetic across these calls, and -O1 does not vectorise. A multiplication and an addition are two
// operations, whether g++ has fused them or not.
#include <unistd.h>

#include <unordered_map>
#include <vector>

#include "cuda_on_cpu_inside.h"

static std::unordered_map<uint32_t, BlockWork> works;

// ---- instructions: x86-64 and AArch64 ----

struct Instruction {
    const char *name;  // without x86-64's prefix (v) and suffixes (ss, sd)
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
// Calls of the C library, by the name between < and the first of @, + and >. They are compiled with -fno-plt:
// objdump does not name the procedure linkage table of every linker.
static const Instruction calls[] = {
    {"fmaf", 2, 0},  {"fma", 2, 0},  {"fmaxf", 1, 0}, {"fmax", 1, 0}, {"fminf", 1, 0},  {"fmin", 1, 0},
    {"expf", 0, 1},  {"exp", 0, 1},  {"exp2f", 0, 1}, {"exp2", 0, 1}, {"logf", 0, 1},   {"log", 0, 1},
    {"log2f", 0, 1}, {"log2", 0, 1}, {"sinf", 0, 1},  {"cosf", 0, 1}, {"tanhf", 0, 1},  {"tanh", 0, 1},
    {"sqrtf", 0, 1}, {"sqrt", 0, 1}, {"powf", 0, 1},  {"erff", 0, 1}, {"expm1f", 0, 1},
    {"cuda_power_of_2", 0, 1},
};

template <int N>
static void look_up(const Instruction (&table)[N], const char *name, size_t length, BlockWork *work) {
    for (const Instruction &i : table)
        if (strlen(i.name) == length && strncmp(i.name, name, length) == 0) {
            work->flops += i.flops, work->special += i.special;
            work->flop_instructions += i.flops > 0, work->special_instructions += i.special > 0;
        }
}

// text: "vmulss %xmm0,%xmm1,%xmm2", "call *0x2e99(%rip)  # 3fd0 <expf@GLIBC_2.27>", "fmul s0, s1, s2"
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
    uintptr_t address, start, end;  // the address looked for, and the function that contains it
};

static void is_around(void *context, const char *, int type, uintptr_t value, size_t size) {
    Function *f = static_cast<Function *>(context);
    enum { FUNCTION = 2 };  // STT_FUNC
    if (type == FUNCTION && value <= f->address && f->address <= value + size)
        f->start = value, f->end = value + size;
}

// A line of objdump: "    12ab:\tvmulss %xmm0,%xmm1,%xmm2".
struct Line {
    uint32_t address, target;  // where it jumps, or 0
    bool begins, goes_on;      // it calls __sanitizer_cov_trace_pc; execution may continue with the next line
    size_t block;              // the last block to reach it
    BlockWork work;
};

static bool is_one_of(const char *name, size_t length, std::initializer_list<const char *> names) {
    for (const char *n : names)
        if (strlen(n) == length && strncmp(n, name, length) == 0) return true;
    return false;
}

// text: "jbe 12ab <f+0x1b>", "jmp *%rax", "cbz w0, 12ab <f+0x1b>", "ret"
static void read_jump(const char *text, Line *line) {
    const size_t length = strcspn(text, " \t\n");
    const char *at = strchr(text, '<');
    line->goes_on = !strstr(text, "<__stack_chk_fail") &&
                    !is_one_of(text, length, {"jmp", "notrack", "ret", "b", "br"});
    if (!at || (*text != 'j' && strncmp(text, "b.", 2) != 0 &&
                !is_one_of(text, length, {"b", "cbz", "cbnz", "tbz", "tbnz"})))
        return;
    for (at--; at > text && at[-1] != ' ' && at[-1] != '\t';) at--;
    line->target = (uint32_t)strtoul(at, NULL, 16);
}

// Adds up the work that follows lines[i], the call with which a block begins.
static void read_block(std::vector<Line> *lines, const std::unordered_map<uint32_t, size_t> &at, size_t i) {
    if (i + 1 == lines->size()) return;
    BlockWork *work = &works[(*lines)[i + 1].address];
    std::vector<size_t> next = {i + 1};
    while (!next.empty()) {
        const size_t n = next.back();
        next.pop_back();
        if (n == lines->size() || (*lines)[n].begins || (*lines)[n].block == i + 1) continue;
        Line *line = &(*lines)[n];
        line->block = i + 1;
        work->flops += line->work.flops, work->special += line->work.special;
        work->flop_instructions += line->work.flop_instructions;
        work->special_instructions += line->work.special_instructions;
        if (line->goes_on) next.push_back(n + 1);
        auto target = at.find(line->target);
        if (target != at.end()) next.push_back(target->second);
    }
}

static void read_function(const Function &f) {
    char command[256], text[1024];
    snprintf(command, sizeof command,
             "objdump -d --no-show-raw-insn --start-address=0x%lx --stop-address=0x%lx /proc/%d/exe",
             f.start, f.end, (int)getpid());
    FILE *listing = popen(command, "r");
    CHECK(listing, "FLOPs are counted with objdump, which cannot be started");
    std::vector<Line> lines;
    std::unordered_map<uint32_t, size_t> at;
    while (fgets(text, sizeof text, listing)) {
        char *rest;
        unsigned long address = strtoul(text, &rest, 16);
        if (rest == text || *rest != ':') continue;
        rest += 1 + strspn(rest + 1, " \t");
        if (strncmp(rest, "addr32 ", 7) == 0) rest += 7;  // a call that the linker has made direct
        Line line = {};
        line.address = (uint32_t)address;
        line.begins = strstr(rest, "<__sanitizer_cov_trace_pc") != NULL;
        read_jump(rest, &line);
        read_instruction(rest, &line.work);
        at[line.address] = lines.size();
        lines.push_back(line);
    }
    CHECK(pclose(listing) == 0,
          "FLOPs are counted with objdump (Debian's package binutils), which has failed");
    for (size_t i = 0; i < lines.size(); i++)
        if (lines[i].begins) read_block(&lines, at, i);
}

const BlockWork &block_work(uint32_t site) {
    auto found = works.find(site);
    if (found != works.end()) return found->second;
    Function f = {site, 0, 0};
    each_symbol(is_around, &f);
    if (f.end) read_function(f);
    return works[site];  // outside any known function, such as a stripped one: no work
}
