// launch.h: the program that started mpirun, and goes on beside it (launch.c).
#ifndef LAUNCH_H
#define LAUNCH_H

// Starts mpirun, and ends this process with what has become of it: mpirun's exit status, or 130 (Ctrl-C)
// and the like where a signal has ended the run, so that an interrupted run is no failed check. Returns
// only if mpirun could not be started, with errno.
int launch(char *const *words);
// In a rank: the ranks have a verdict, or one of them says why they have none. Safe in a signal handler.
void launcher_hears(void);

#endif
