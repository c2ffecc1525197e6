// mesh.h: the process grid. Each axis of parallelism has a group, and a group of one is legal everywhere
// and takes the same road. On a single device every group has one member.
#ifndef MESH_H
#define MESH_H

#ifdef __cplusplus
extern "C" {
#endif

// A communication line: requests of one line run in the order in which they were started, as on a stream of
// their own; requests of different lines do not wait for each other (comm.h).
typedef enum Line {
    LINE_WORLD, LINE_TP, LINE_CP, LINE_PP_FORWARD, LINE_PP_BACKWARD, LINE_DP, LINE_EP,
    LINE_DP_ACROSS,  // of those ranks of dp that have the same part, in other nodes
    LINE_EP_ACROSS,  // of those ranks of ep that have the same place in other nodes
    COMM_LINES
} Line;

const char *line_name(Line line);  // "world" "tp" "cp" "pp" "pp back" "dp" "ep" "dp across" "ep across"

typedef struct Group {
    int size;           // members
    int rank;           // mine, 0 … size - 1
    const char *name;   // "world" "dp" "tp" …
    const int *member;  // world rank of each member; NULL for a group of one that nobody communicates in
    int handle;         // the transport's communicator, from comm_group
    Line line;          // on which its requests run
} Group;

// pp has the same members twice: activations go forward on one line, gradients backward on the other.
// The products: gradients add up over dp_cp, those of experts over expert_dp (the ranks of dp x cp x tp
// that hold the same experts); what one replica of the model stores is spread over tp_pp, and of experts
// over ep_pp.
typedef struct Mesh {
    Group world, dp, pp, pp_backward, cp, tp, ep;
    Group dp_cp, expert_dp, tp_pp, ep_pp;
} Mesh;

// Degrees of each axis, 1 where one is left out; the world's size is dp pp cp tp. ep takes its ranks within
// dp x cp x tp, neighbours first, so that tokens are dispatched within a node as far as it reaches: beside
// experts tp is sequence parallel, and each of its ranks has tokens of its own.
typedef struct MeshShape {
    int dp, pp, cp, tp, ep;
} MeshShape;

// As in Mesh.
typedef enum MeshAxis {
    AXIS_WORLD, AXIS_DP, AXIS_PP, AXIS_PP_BACKWARD, AXIS_CP, AXIS_TP, AXIS_EP,
    AXIS_DP_CP, AXIS_EXPERT_DP, AXIS_TP_PP, AXIS_EP_PP,
    MESH_AXES
} MeshAxis;

// The ranks that share this axis's group with `rank`, in order; returns how many. The shape need not be
// that of a running program.
int mesh_members(MeshShape shape, MeshAxis axis, int rank, int *members);

// The grid of one device; needs no communication.
Mesh mesh_single(void);
// The grid of all ranks. Ranks are numbered with tp fastest, then cp, dp, pp, so that the axis that talks
// most stays within a node (Megatron-LM's order). Collective. Fatal, naming the flags and what would fit,
// when the degrees do not multiply up to the number of ranks.
Mesh mesh_new(MeshShape shape);
// The grid of a cluster of any size as its rank 0 sees it, for comm_stand_for_all: no group is made. The
// caller ends it with mesh_end, which is for no other grid: groups live until comm_finish.
Mesh mesh_standing_for_all(MeshShape shape);
void mesh_end(Mesh *mesh);
void mesh_check(MeshShape shape, int ranks);  // fatal as mesh_new, which calls it; not collective
Group *mesh_group(Mesh *mesh, MeshAxis axis);
// Header lines: ranks, hosts, the degrees, and the members of each axis larger than one.
void mesh_print(const Mesh *mesh, MeshShape shape);

#ifdef __cplusplus
}
#endif
#endif
