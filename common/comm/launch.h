// launch.h: the program that starts mpirun and stays as its parent (launch.c).
#ifndef LAUNCH_H
#define LAUNCH_H

// Starts mpirun, waits for it, and ends this process with mpirun's exit status, or with 130 (Ctrl-C) or the
// like if a signal ended the run, so that an interrupted run is not taken for a failed check. The run's
// temporary files are in a folder of their own in `place`. Returns only if mpirun could not be started: the
// errno of that.
int launch(char *const *words, const char *place);
// Called in a rank; tells the program that started mpirun that the ranks have a verdict, or that one of
// them says why there is none. Safe in a signal handler.
void launcher_hears(void);

#endif
