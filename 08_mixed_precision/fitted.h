// fitted.h: the factors of cost_table.c, and how far off they are on runs that they have not
// seen, as find_config has written it:
//     find_config --runs 08_mixed_precision/published.csv --fit --fitted FILE
#ifndef FITTED_H
#define FITTED_H

#define FITTED_FACTORS {0.7351, 0.6682, 1, 0.005041, 0.4523, 1, 0.6371, 0.808}
#define FITTED_RUNS 38
#define FITTED_MEDIAN 0.033  // errors of a step's seconds
#define FITTED_WORST 0.158

#endif
