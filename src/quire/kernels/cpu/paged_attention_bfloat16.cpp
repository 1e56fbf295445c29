// Attention over pages with AVX-512 and its products of bfloat16: see paged_attention_body.h.

#include "paged_attention.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
#pragma GCC target("arch=x86-64-v4,avx512bf16")
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // in headers of GCC 12
#define WIDTH 16
#define PAIRS 1
#include "paged_attention_body.h"

const Attend quire_attend_bfloat16[3] = {attend<float>, attend<bfloat16>, attend<float16>};
#else
const Attend quire_attend_bfloat16[3] = {};
#endif
