// Low-rank products with AVX-512: see low_rank_body.h.
#include "low_rank.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
#pragma GCC target("arch=x86-64-v4")
#include "low_rank_body.h"

const RunCall quire_low_rank_avx512[2] = {run<float>, run<bfloat16>};
#else
const RunCall quire_low_rank_avx512[2] = {};
#endif
