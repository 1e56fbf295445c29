// Attention over pages with AVX2: see paged_attention_body.h.

#include "paged_attention.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
#pragma GCC target("arch=x86-64-v3")
#define WIDTH 8
#define PAIRS 0
#include "paged_attention_body.h"

const Attend quire_attend_avx2[3] = {attend<ByVectors<float>>, attend<ByVectors<bfloat16>>, attend<ByVectors<float16>>};
#else
const Attend quire_attend_avx2[3] = {};
#endif
