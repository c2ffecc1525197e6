// data_same.c: whether all ranks find the same tokens. Each draws its samples from the file that its host has
// under this name.
#include <sys/stat.h>

#include "data.h"

// Which file this is, on this host; if that is not known, another one on each rank.
static uint64_t file_hash(const char *path) {
    struct stat s;
    if (stat(path, &s) != 0) return (uint64_t)base_rank();
    const int64_t which[] = {(int64_t)s.st_dev, (int64_t)s.st_ino, s.st_size, s.st_mtim.tv_sec,
                             s.st_mtim.tv_nsec};
    return hash_bytes(HASH_SEED, which, sizeof which);
}

void data_check_same(const Data *data, uint64_t print, Group world) {
    double most = comm_max((double)data->count, world), least = -comm_max(-(double)data->count, world);
    CHECK(most == least,
          "%s: one rank finds %.0f tokens there, and another %.0f: all hosts need the same file", data->path,
          most, least);
    if (!print && comm_same(file_hash(data->path), world)) return;
    if (!print) print = data_print(data);
    CHECK(comm_same(print, world),
          "%s: not all ranks find the same %lld tokens there: all hosts need the same file", data->path,
          (long long)data->count);
}
