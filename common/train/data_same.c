// data_same.c: whether all ranks find the same tokens. Each draws its samples from the file that its host has
// under this name.
#include "data.h"

void data_check_same(const Data *data, uint64_t hash, Group world) {
    double most = comm_max((double)data->count, world), least = -comm_max(-(double)data->count, world);
    CHECK(most == least,
          "%s: one rank finds %.0f tokens there, and another %.0f: all hosts need the same file",
          data->path, most, least);
    char *path = (char *)data->path;
    CHECK(hash ? comm_same(hash, world) : comm_same_files(&path, 1, world),
          "%s: not all ranks find the same %lld tokens there: all hosts need the same file", data->path,
          (long long)data->count);
}
