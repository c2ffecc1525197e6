// mesh.c: the grid of a single device. Every axis is a group of one, and all code takes the road of groups.
#include "mesh.h"

Mesh mesh_single(void) {
    const Group one = {.size = 1, .rank = 0};
    return (Mesh){.world = one, .dp = one, .pp = one, .cp = one, .tp = one, .ep = one};
}
