// Low-rank products with vectors that any processor has: see low_rank_body.h.
#define REGISTER 16
#include "low_rank.h"

#include "low_rank_body.h"

const RunCall quire_low_rank_portable[2] = {run<float>, run<bfloat16>};
