// mesh.h: the process grid. Each axis of parallelism has a group, and a group of one is legal everywhere
// and takes the same road. On a single device every group has one member.
#ifndef MESH_H
#define MESH_H

#ifdef __cplusplus
extern "C" {
#endif

typedef struct Group {
    int size;           // members
    int rank;           // mine, 0 … size - 1
    const char *name;   // "world" "dp" "tp" …
    const int *member;  // world rank of each member; NULL for a group of one that nobody communicates in
    int handle;         // the transport's communicator, from comm_group
} Group;

typedef struct Mesh {
    Group world, dp, pp, cp, tp, ep;
} Mesh;

// Degrees of each axis; world size is dp pp cp tp (ep divides dp, and takes its groups within it).
typedef struct MeshShape {
    int dp, pp, cp, tp, ep;
} MeshShape;

// The grid of one device; needs no communication.
Mesh mesh_single(void);
// The grid of all ranks. Ranks are numbered with tp fastest, then cp, dp, pp, so that the axis that talks
// most stays within a node (Megatron-LM's order). Collective. Fatal, naming the flags and what would fit,
// when the degrees do not multiply up to the number of ranks.
Mesh mesh_new(MeshShape shape);
// Header lines: ranks, hosts, the degrees, and the members of each group larger than one.
void mesh_print(const Mesh *mesh, MeshShape shape);

#ifdef __cplusplus
}
#endif
#endif
