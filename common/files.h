// files.h: files that are written whole or not at all, and files that are checked before they are read.
#ifndef FILES_H
#define FILES_H

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

// The sentence that says what is wrong, for a function that returns it. It lasts until the next one.
const char *fault_text(const char *format, ...) PRINTF_LIKE(1, 2);

// "cannot VERB PATH: " and the text of errno, as such a sentence.
const char *file_fault(const char *verb, const char *path);
// The first of `count` names that occurs twice, or NULL.
const char *name_twice(char *const *names, int count);

// Puts a '?' in place of each byte that is not part of UTF-8, which JSON and SVG are written in: a path may
// have any.
void make_utf8(char *text);

// ---- writing what a flag names: --json FILE, --trace FILE, pictures ---- A regular file is written under
// another name in the same folder and renamed when it is complete, so that a full disk or a killed run
// leaves an older file as it was; symbolic links are followed. Anything else (a device, a FIFO,
// /dev/stdout) is written directly and never replaced. On failure all three functions are fatal, naming
// `flag` ("--json") and the file.

// Checks that the file can be written. Leaves nothing behind; only rank 0 checks.
void output_check(const char *flag, const char *name);
// Opens it; the caller ends it with output_close.
FILE *output_open(const char *flag, const char *name);
// Closes it and gives it its final name.
void output_close(FILE *file, const char *flag, const char *name);
// Flushes any file that was written to the disk and closes it. Returns NULL, or the sentence that says what
// failed now or in an earlier write.
const char *file_close_flushed(FILE *file, const char *path);

// ---- reading ----

// Maps a regular file into memory, read-only: only the pages that are touched are read, and the ranks of
// one machine share them. The caller ends it with input_unmap. Never blocks: a FIFO, a device or a folder
// is refused before it is opened. Returns NULL, or a sentence that says what is wrong (static buffer). If
// the file is truncated later, reading the missing bytes is fatal.
const char *input_map(const char *path, const uint8_t **bytes, size_t *size);
void input_unmap(const uint8_t *bytes, size_t size);
// From now on an access to a mapped file that finds nothing there, since the file has become shorter or, in
// memory that ranks share, its disk is full, is fatal and says so. input_map calls it.
void watch_mapped_files(void);
// Reads a regular file of fewer than `most` bytes into *text and appends a zero byte; the caller frees it.
// Returns as input_map does, and a sentence if the file contains a zero byte.
const char *input_text(const char *path, size_t most, char **text, size_t *size);
// A file of these bytes that is in memory alone, as long as this process is. Returns its path there, for the
// caller to free.
char *input_in_memory(const void *bytes, size_t size);

#ifdef __cplusplus
}
#endif
#endif
