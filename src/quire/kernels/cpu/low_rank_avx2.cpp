// Low-rank products with AVX2: see low_rank_body.h.
#define REGISTER 32
#include "low_rank.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
#pragma GCC target("arch=x86-64-v3")
#include "low_rank_body.h"

const RunCall quire_low_rank_avx2[2] = {run<float>, run<bfloat16>};
#else
const RunCall quire_low_rank_avx2[2] = {};
#endif
