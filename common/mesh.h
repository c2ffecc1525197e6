// mesh.h: the process grid. Each axis of parallelism has a group, and a group of one is legal everywhere
// and takes the same road. On a single device every group has one member.
#ifndef MESH_H
#define MESH_H

typedef struct Group {
    int size;  // members
    int rank;  // mine, 0 … size - 1
} Group;

typedef struct Mesh {
    Group world, dp, pp, cp, tp, ep;
} Mesh;

// The grid of one device.
Mesh mesh_single(void);

#endif
