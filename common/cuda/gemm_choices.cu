// gemm_choices.cu: see gemm_choices.h.
#include <stdlib.h>
#include <string.h>

#include "files.h"
#include "gemm_choices.h"

struct Choice {
    unsigned char kind[KIND_BYTES], algorithm[ALGORITHM_BYTES];
};

static struct {
    FILE *to;
    char *name;  // of that file
    Choice *choice;
    size_t count;
} state;

static void check_written(bool is_written) {
    CHECK(is_written && fflush(state.to) == 0, "ULTRASCALE_GEMM: %s", file_fault("write", state.name));
}

void choices_write(const char *path, const char *machine) {
    state.name = format_text("%s.%d", path, base_rank());
    state.to = fopen(state.name, "wb");
    CHECK(state.to, "ULTRASCALE_GEMM: %s", file_fault("write", state.name));
    check_written(fprintf(state.to, "%s, rank %d of %d\n", machine, base_rank(), base_launched()) > 0);
}

void choices_add(const void *kind, const void *algorithm) {
    Choice one;
    memcpy(one.kind, kind, sizeof one.kind);
    memcpy(one.algorithm, algorithm, sizeof one.algorithm);
    check_written(fwrite(&one, sizeof one, 1, state.to) == 1);
}

const void *choices_find(const void *kind) {
    for (size_t i = 0; i < state.count; i++)
        if (!memcmp(state.choice[i].kind, kind, KIND_BYTES)) return state.choice[i].algorithm;
    return NULL;
}

// Returns the number of files that the run has written; all is what the files before say, or 0.
static int read_one(const char *path, const char *machine, int rank, int all) {
    char *name = format_text("%s.%d", path, rank), *begins = format_text("%s, rank %d of ", machine, rank);
    char line[512] = "";
    int ranks = 0;
    FILE *from = fopen(name, "rb");
    CHECK(from, "ULTRASCALE_GEMM: %s", file_fault("read", name));
    if (fgets(line, sizeof line, from) && !strncmp(line, begins, strlen(begins)))
        ranks = atoi(line + strlen(begins));
    CHECK(ranks > rank,
          "%s is not of %s, but begins with \"%.*s\": make it with ULTRASCALE_GEMM=timed:%s in a run here",
          name, machine, (int)strcspn(line, "\n"), line, path);
    CHECK(ranks == all || all == 0, "%s is of %d ranks, and %s.0 of %d: make all again, with timed:%s",
          name, ranks, path, all, path);
    Choice one;
    size_t got;
    while ((got = fread(&one, 1, sizeof one, from)) == sizeof one) {
        if (choices_find(one.kind)) continue;
        state.choice = static_cast<Choice *>(realloc(state.choice, sizeof one * (state.count + 1)));
        CHECK(state.choice, "out of host memory for %s", name);
        state.choice[state.count++] = one;
    }
    CHECK(got == 0, "%s is cut off: make it again, with ULTRASCALE_GEMM=timed:%s", name, path);
    fclose(from);
    free(name);
    free(begins);
    return ranks;
}

void choices_read(const char *path, const char *machine) {
    const int ranks = read_one(path, machine, 0, 0);
    for (int rank = 1; rank < ranks; rank++) read_one(path, machine, rank, ranks);
}
