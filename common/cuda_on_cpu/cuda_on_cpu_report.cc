// cuda_on_cpu_report.cc: the sentence that ends the program: which kernel, block and thread, at which line of
// the source, and what it did.
#include <cxxabi.h>
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cuda_on_cpu_inside.h"

// Buffers for the short texts of a sentence, used in turn.
static char *next_text(void) {
    static char texts[8][256];
    static unsigned turn;
    return texts[turn++ % 8];
}

// Coordinates that do not vary are left out.
static const char *index_text(const char *word, uint3 i, uint3 of) {
    char *text = next_text();
    if (of.z > 1) snprintf(text, 256, "%s (%u, %u, %u)", word, i.x, i.y, i.z);
    else if (of.y > 1) snprintf(text, 256, "%s (%u, %u)", word, i.x, i.y);
    else snprintf(text, 256, "%s %u", word, i.x);
    return text;
}

const char *thread_text(const Thread *t) { return index_text("thread", t->index, blockDim); }

// ---- the program's own symbols ----

static const char *program_path(void) {
    static char path[4096];
    ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
    path[length > 0 ? length : 0] = 0;
    return path;
}

// The offset at which the program was loaded.
static int first_base(struct dl_phdr_info *info, size_t, void *base) {
    *static_cast<uintptr_t *>(base) = info->dlpi_addr;
    return 1;  // stop: the program comes first
}

static uintptr_t find_base(void) {
    uintptr_t base = 0;
    dl_iterate_phdr(first_base, &base);
    return base;
}

uintptr_t load_base = find_base();

void each_symbol(void (*visit)(void *context, const char *name, int type, uintptr_t value, size_t size),
                 void *context) {
    int file = open("/proc/self/exe", O_RDONLY);
    struct stat status;
    CHECK(file >= 0 && fstat(file, &status) == 0, "cannot read %s, the program itself", program_path());
    void *map = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_PRIVATE, file, 0);
    CHECK(map != MAP_FAILED, "cannot map %s, the program itself", program_path());
    close(file);
    const char *bytes = static_cast<const char *>(map);
    const Elf64_Ehdr *header = reinterpret_cast<const Elf64_Ehdr *>(bytes);
    const Elf64_Shdr *section = reinterpret_cast<const Elf64_Shdr *>(bytes + header->e_shoff);
    bool found = false;
    for (int s = 0; s < header->e_shnum; s++) {
        if (section[s].sh_type != SHT_SYMTAB) continue;
        found = true;
        const Elf64_Sym *symbol = reinterpret_cast<const Elf64_Sym *>(bytes + section[s].sh_offset);
        const char *names = bytes + section[section[s].sh_link].sh_offset;
        for (size_t i = 0; i < section[s].sh_size / sizeof *symbol; i++)
            if (symbol[i].st_shndx != SHN_UNDEF)
                visit(context, names + symbol[i].st_name, ELF64_ST_TYPE(symbol[i].st_info),
                      symbol[i].st_value, symbol[i].st_size);
    }
    munmap(map, (size_t)status.st_size);
    CHECK(found, "%s has no symbol table, which CUDA on the CPU needs: build it without strip",
          program_path());
}

// ---- names and places ----

struct Search {
    uintptr_t address;
    char name[1024];
};

static void is_it(void *context, const char *name, int type, uintptr_t value, size_t) {
    Search *search = static_cast<Search *>(context);
    if (type == STT_FUNC && value == search->address)
        snprintf(search->name, sizeof search->name, "%s", name);
}

// "softmax<float, 256>": from the kernel's symbol, as the launch may only say softmax<T, 256>.
static const char *kernel_text(const CudaLaunch *launch) {
    static char text[512];
    Search search = {reinterpret_cast<uintptr_t>(launch->kernel) - load_base, ""};
    each_symbol(is_it, &search);
    int status;
    char *whole = abi::__cxa_demangle(search.name, NULL, NULL, &status);
    if (status != 0) return launch->name;
    // "void softmax<float, 256>(float*, int)": drop the result type, which templates have, and the parameters
    const char *begin = strncmp(whole, "void ", 5) == 0 ? whole + 5 : whole;
    if (strncmp(begin, "(anonymous namespace)::", 23) == 0) begin += 23;
    int depth = 0, length = 0;
    while (begin[length] && !(begin[length] == '(' && depth == 0)) {
        depth += (begin[length] == '<') - (begin[length] == '>');
        length++;
    }
    snprintf(text, sizeof text, "%.*s", length, begin);
    free(whole);
    return text;
}

// From addr2line, which comes with the compiler. Among inlined functions, the innermost one that is not
// part of the emulator.
const char *line_text(const void *site) {
    char *text = next_text(), command[4400], line[1024];
    // A return address is after the call.
    uintptr_t address = reinterpret_cast<uintptr_t>(site) - load_base - 1;
    snprintf(text, 256, "address 0x%lx", address);
    snprintf(command, sizeof command, "addr2line -i -e '%s' 0x%lx 2>/dev/null", program_path(), address);
    FILE *answer = popen(command, "r");
    while (answer && fgets(line, sizeof line, answer)) {
        line[strcspn(line, " \n")] = 0;  // "file:12 (discriminator 3)"
        if (line[0] == '?' || strstr(line, "cuda_on_cpu.h:") || strstr(line, "instructions.h:") ||
            strstr(line, "instructions_hopper.h:"))
            continue;
        // The sources' folder is "." (cuda.mk: -fdebug-prefix-map).
        snprintf(text, 256, "%.255s", line + (strncmp(line, "./", 2) == 0 ? 2 : 0));
        break;
    }
    if (answer) pclose(answer);
    return text;
}

void broken(const void *site, const char *format, ...) {
    char sentence[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(sentence, sizeof sentence, format, arguments);
    va_end(arguments);
    if (!now.launch) fatal("%s%s%s", site ? line_text(site) : "", site ? ": " : "", sentence);
    static char whole[2048];
    snprintf(whole, sizeof whole, "kernel %s, %s, %s%s%s: %s", kernel_text(now.launch),
             index_text("block", blockIdx, gridDim), thread_text(now.thread), site ? ", " : "",
             site ? line_text(site) : "", sentence);
    fail(whole);
}
