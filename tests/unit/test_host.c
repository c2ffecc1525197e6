// test_host.c: the memory and cores that the host allows, according to kernel files that the test provides.
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fatal.h"

// While `kernel` names a folder, the kernel's files are read from there. Replaces the C library's in this
// program.
static const char *kernel;

FILE *fopen(const char *path, const char *mode) {
    char moved[512] = "";
    if (kernel && (!strncmp(path, "/proc/", 6) || !strncmp(path, "/sys/", 5)))
        snprintf(moved, sizeof moved, "%s%s", kernel, path);
    int file =
        open(*moved ? moved : path, strchr(mode, 'w') ? O_WRONLY | O_CREAT | O_TRUNC : O_RDONLY, 0666);
    return file < 0 ? NULL : fdopen(file, mode);
}

// A kernel's file below the folder.
static void kernel_says(const char *folder, const char *path, const char *text) {
    char *command =
        format_text("mkdir -p $(dirname %s%s) && printf -- '%s' >%s%s", folder, path, text, folder, path);
    assert_int_equal(system(command), 0);
    free(command);
}

typedef struct Said {
    const char *file, *text;
    double left;  // from then on
} Said;

static void each_counts(const Said *said, size_t count, double (*left)(void)) {
    char folder[] = "/tmp/test_host.XXXXXX";
    assert_non_null(mkdtemp(folder));
    for (size_t i = 0; i < count; i++) {
        kernel_says(folder, said[i].file, said[i].text);
        kernel = folder;
        double is = left();
        kernel = NULL;
        if (is != said[i].left) fail_msg("with %s %.0f are left, not %.0f", said[i].file, is, said[i].left);
    }
    char *command = format_text("rm -r %s", folder);
    assert_int_equal(system(command), 0);
    free(command);
}

// The smallest limit of a process's cgroup and those that contain it counts, in the files of either
// version. The cgroups visible in a container may begin below the path that the kernel names.
static void memory_of_cgroups_is_counted(void **state) {
    (void)state;
    static const Said said[] = {
        {"/proc/meminfo", "MemTotal: 9000 kB\nMemAvailable: 8000 kB\n", 8192000},
        {"/proc/self/cgroup", "4:cpu,cpuacct:/\n3:memory:/job/step\n0::/user/run\n", 8192000},
        {"/sys/fs/cgroup/memory.max", "max\n", 8192000},
        {"/sys/fs/cgroup/memory.current", "7000000\n", 8192000},
        {"/sys/fs/cgroup/user/memory.max", "5000000\n", 8192000},
        {"/sys/fs/cgroup/user/memory.current", "1000000\n", 4000000},
        {"/sys/fs/cgroup/user/memory.stat", "file 9\ninactive_file 500000\n", 4500000},
        {"/sys/fs/cgroup/user/run/memory.current", "600000\n", 4500000},
        {"/sys/fs/cgroup/user/run/memory.max", "4600000\n", 4000000},
        {"/sys/fs/cgroup/memory/memory.usage_in_bytes", "1000000\n", 4000000},
        {"/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n", 4000000},
        {"/sys/fs/cgroup/memory/memory.limit_in_bytes", "4500000\n", 3500000},
        {"/sys/fs/cgroup/memory/job/step/memory.usage_in_bytes", "2000000\n", 3500000},
        {"/sys/fs/cgroup/memory/job/step/memory.limit_in_bytes", "5000000\n", 3000000},
        {"/sys/fs/cgroup/memory/job/step/memory.stat", "inactive_file 7000\ntotal_inactive_file 200000\n",
         3200000},
        {"/sys/fs/cgroup/memory/job/memory.limit_in_bytes", "2000000\n", 3200000},
        {"/sys/fs/cgroup/memory/job/memory.usage_in_bytes", "2000000\n", 0},
    };
    each_counts(said, sizeof said / sizeof *said, host_memory_left);
}

static void asks_for_80_MB(void *ranks) {
    host_share(*(const int *)ranks);
    free(host_alloc(80000000));
}

// 200 MB hold 80 MB and what must remain free, but not 80 MB for each of two ranks.
static void ranks_share_the_memory(void **state) {
    (void)state;
    char folder[] = "/tmp/test_host.XXXXXX";
    assert_non_null(mkdtemp(folder));
    kernel_says(folder, "/proc/meminfo", "MemTotal: 9000000 kB\nMemAvailable: 195313 kB\n");
    kernel = folder;
    Ended alone = run_apart(asks_for_80_MB, &(int){1}), shared = run_apart(asks_for_80_MB, &(int){2});
    kernel = NULL;
    char *command = format_text("rm -r %s", folder);
    assert_int_equal(system(command), 0);
    free(command);
    assert_int_equal(alone.status, 0);
    assert_true(is_one_sentence(&shared));
    assert_string_equal(shared.said,
                        "test_host: out of host memory: 80.0 MB more were asked for, and 100 MB are left "
                        "to each of the 2 ranks of this machine\n");
}

static double of_8_cores(void) { return host_cores(8); }

// A part of a core counts as one; a quota of more cores than exist does not limit.
static void time_of_cores_is_counted(void **state) {
    (void)state;
    static const Said said[] = {
        {"/proc/self/cgroup", "5:cpuset:/\n4:cpuacct,cpu:/job\n0::/user/run\n", 8},
        {"/sys/fs/cgroup/user/cpu.max", "max 100000\n", 8},
        {"/sys/fs/cgroup/user/cpu.max", "1600000 100000\n", 8},
        {"/sys/fs/cgroup/user/run/cpu.max", "350000 50000\n", 7},
        {"/sys/fs/cgroup/user/cpu.max", "510000 100000\n", 6},
        {"/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n", 6},
        {"/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n", 6},
        {"/sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "40000\n", 6},
        {"/sys/fs/cgroup/cpu/job/cpu.cfs_period_us", "20000\n", 2},
        {"/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "1000\n", 1},
    };
    each_counts(said, sizeof said / sizeof *said, of_8_cores);
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    const struct CMUnitTest tests[] = {cmocka_unit_test(memory_of_cgroups_is_counted),
                                       cmocka_unit_test(ranks_share_the_memory),
                                       cmocka_unit_test(time_of_cores_is_counted)};
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
