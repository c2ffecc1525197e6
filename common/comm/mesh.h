// mesh.h: the process grid. Each axis of parallelism has a group; a group of one is legal everywhere and is
// no special case. On a single device every group has one member.
#ifndef MESH_H
#define MESH_H

#ifdef __cplusplus
extern "C" {
#endif

// A communication line: requests of one line run in the order in which they were started, as on a stream of
// their own; requests of different lines do not wait for each other (comm.h).
typedef enum Line {
    LINE_WORLD, LINE_TP, LINE_CP, LINE_PP_FORWARD, LINE_PP_BACKWARD, LINE_DP, LINE_EP,
    LINE_DP_ACROSS,  // among the ranks of dp on different nodes that have the same part
    LINE_EP_ACROSS,  // among the ranks of ep on different nodes that have the same place in their node
    COMM_LINES
} Line;

const char *line_name(Line line);  // "world" "tp" "cp" "pp" "pp back" "dp" "ep" "dp across" "ep across"

typedef struct Group {
    int size;           // members
    int rank;           // of this process, 0 … size - 1
    const char *name;   // "world" "dp" "tp" …
    const int *member;  // world rank of each member; NULL for a group of one in which nothing is sent
    int handle;         // number of the group, from comm_group
    Line line;          // the line on which its requests run
} Group;

// pp and pp_backward have the same members: activations are sent forward on one line, gradients backward on
// the other. The products of axes: gradients are summed over dp_cp, and those of experts over expert_dp
// (the ranks of dp x cp x tp that hold the same experts); what one replica of the model stores is spread
// over tp_pp, and for experts over ep_pp.
typedef struct Mesh {
    Group world, dp, pp, pp_backward, cp, tp, ep;
    Group dp_cp, expert_dp, tp_pp, ep_pp;
} Mesh;

// The degree of each axis; 0 counts as 1. The world's size is dp pp cp tp. ep takes its ranks from dp x cp
// x tp, neighbours first, so that tokens are dispatched within a node as far as possible: for experts, tp
// acts as sequence parallelism, where each of its ranks has tokens of its own.
typedef struct MeshShape {
    int dp, pp, cp, tp, ep;
} MeshShape;

// The groups of Mesh.
typedef enum MeshAxis {
    AXIS_WORLD, AXIS_DP, AXIS_PP, AXIS_PP_BACKWARD, AXIS_CP, AXIS_TP, AXIS_EP,
    AXIS_DP_CP, AXIS_EXPERT_DP, AXIS_TP_PP, AXIS_EP_PP,
    MESH_AXES
} MeshAxis;

// Sets members to the ranks in the group of this axis that `rank` is in, in order, and returns how many.
// The shape need not be that of a running program.
int mesh_members(MeshShape shape, MeshAxis axis, int rank, int *members);

// The grid of one device; needs no communication.
Mesh mesh_single(void);
// The grid of all ranks. Ranks are numbered with tp fastest, then cp, dp, pp, so that the axis that
// communicates most stays within a node (Megatron-LM's order). Collective. If the product of the degrees is
// not the number of ranks it is fatal, naming the flags and what would fit.
Mesh mesh_new(MeshShape shape);
// The grid of a cluster of any size as seen by one of its ranks, for comm_stand_for_all (and, if that is not
// rank 0, comm_act_as): no group is made. The caller ends it with mesh_end, which is for no other grid,
// since groups live until comm_finish.
Mesh mesh_standing_for_all(MeshShape shape, int rank);
void mesh_end(Mesh *mesh);
void mesh_check(MeshShape shape, int ranks);  // fatal as mesh_new, which calls it; not collective
Group *mesh_group(Mesh *mesh, MeshAxis axis);
// A group's ranks in runs of k neighbours, as nodes have them: this rank's run, and the ranks that have this
// rank's place in every run. k divides the group's size. Collective, as comm_group; a group of one stays as
// it is.
Group mesh_inside(Group group, int k, const char *name, Line line);
Group mesh_across(Group group, int k, const char *name, Line line);
// Prints header lines: ranks, hosts, the degrees, and the members of each axis larger than one.
void mesh_print(const Mesh *mesh, MeshShape shape);

#ifdef __cplusplus
}
#endif
#endif
