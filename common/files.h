// files.h: files that are written whole or not at all, and files that are looked at before they are read.
#ifndef FILES_H
#define FILES_H

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

// ---- writing what a flag names: --json FILE, --trace FILE, pictures ---- A regular file is written beside
// its place and renamed over it when it is whole, so that a full disk or a killed run leaves an older one
// as it was; symbolic links are followed. What is no regular file (a device, a FIFO, /dev/stdout) is
// written through, and never replaced. All three are fatal, naming `flag` ("--json") and the file.

// Whether the file could be written now. Leaves nothing behind; rank 0 looks for all.
void output_check(const char *flag, const char *name);
FILE *output_open(const char *flag, const char *name);
// Closes it, and gives it its name.
void output_close(FILE *file, const char *flag, const char *name);

// ---- reading ----

// Maps a regular file into memory: only what is touched is read, and ranks of one machine share it. Never
// waits: a FIFO, a device and a folder are refused before they are opened. Returns NULL, or the sentence
// that says what is wrong (static buffer). A file that becomes shorter later is fatal when its missing
// bytes are read.
const char *input_map(const char *path, const uint8_t **bytes, size_t *size);
void input_unmap(const uint8_t *bytes, size_t size);
// The text of a regular file of fewer than `most` bytes, with a zero behind it; the caller frees it. The
// fault as above.
const char *input_text(const char *path, size_t most, char **text, size_t *size);
// A file of these bytes that is in memory alone, as long as this process is. Returns its path there, for the
// caller to free.
char *input_in_memory(const void *bytes, size_t size);

#ifdef __cplusplus
}
#endif
#endif
