// todo.h: TODO("…"), the body of an exercise that is not begun. `make grade` includes this file first.
#ifndef TODO_H
#define TODO_H

#include <stdio.h>
#include <unistd.h>

__attribute__((noreturn)) static inline void todo(const char *function, const char *task) {
    fprintf(stderr, "TODO in %s: %s\n", function, task);
    _exit(1);
}
#define TODO(task) todo(__func__, task)

#endif
