// host.c: how much memory and time of cores this machine, and the control groups of this process, leave it.
#include <math.h>
#include <string.h>

#include "base.h"

// The number in a file of the kernel, from the first line that matches this format; -1 if none does.
static double number_in(const char *path, const char *format) {
    char line[128];
    double number = -1;
    FILE *file = fopen(path, "r");
    while (file && number < 0 && fgets(line, sizeof line, file))
        if (sscanf(line, format, &number) != 1) number = -1;
    if (file) fclose(file);
    return number;
}

static double number_of(const char *folder, const char *file, const char *format) {
    char path[4200];
    snprintf(path, sizeof path, "%s/%s", folder, file);
    return number_in(path, format);
}

// What the limit of one cgroup, of version 1 or 2, leaves; INFINITY if it has no limit.
typedef double Left(const char *folder, bool second);

// Bytes; inactive pages of files count as free.
static double memory_left(const char *folder, bool second) {
    double most = number_of(folder, second ? "memory.max" : "memory.limit_in_bytes", "%lf"),
           used = number_of(folder, second ? "memory.current" : "memory.usage_in_bytes", "%lf"),
           files =
               number_of(folder, "memory.stat", second ? "inactive_file %lf" : "total_inactive_file %lf");
    return most < 0 || used < 0 ? INFINITY : most - used + fmax(files, 0);
}

// Cores: the quota is the time that all of them together may run in each period.
static double cores_left(const char *folder, bool second) {
    double quota = number_of(folder, second ? "cpu.max" : "cpu.cfs_quota_us", "%lf"),
           period = number_of(folder, second ? "cpu.max" : "cpu.cfs_period_us", second ? "%*s %lf" : "%lf");
    return quota < 0 || period <= 0 ? INFINITY : quota / period;
}

// Whether a list such as "cpu,cpuacct" contains the name.
static bool among(const char *controllers, const char *name) {
    size_t length = strlen(name);
    for (const char *at = controllers; *at; at += strcspn(at, ","), at += *at == ',')
        if (strcspn(at, ",") == length && !strncmp(at, name, length)) return true;
    return false;
}

// The least that this process's cgroup and those around it leave, of either version. A line of
// /proc/self/cgroup is "0::/path" in version 2 and "4:memory:/path" in version 1. A container may see only
// the end of the path, or none of it.
static double cgroups_left(const char *controller, Left *left_by) {
    char line[4096], folder[4096 + 32];
    double left = INFINITY;
    FILE *file = fopen("/proc/self/cgroup", "r");
    while (file && fgets(line, sizeof line, file)) {
        char *name = strchr(line, ':'), *path = name ? strchr(name + 1, ':') : NULL;
        if (!path) continue;
        bool second = path == name + 1;
        *path++ = '\0';
        if (!second && !among(name + 1, controller)) continue;
        path[strcspn(path, "\n")] = '\0';
        snprintf(folder, sizeof folder, "/sys/fs/cgroup%s%s%s", second ? "" : "/", second ? "" : controller,
                 path);
        char *root = folder + strlen(folder) - strlen(path), *end = root + strlen(root);
        for (; end; end = strrchr(root, '/')) {
            *end = '\0';
            left = fmin(left, left_by(folder, second));
        }
    }
    if (file) fclose(file);
    return left;
}

double host_memory_left(void) {
    double left = 1024 * number_in("/proc/meminfo", "MemAvailable: %lf");
    return fmin(left < 0 ? INFINITY : left, cgroups_left("memory", memory_left));
}

double host_memory_written(void) { return fmax(0, 1024 * number_in("/proc/self/status", "RssAnon: %lf")); }

int host_cores(int cores) { return (int)fmax(1, fmin(cores, ceil(cgroups_left("cpu", cores_left)))); }
