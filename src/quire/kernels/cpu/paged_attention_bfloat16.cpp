// Attention over pages of bfloat16 with AVX-512 and its products of pairs: see paged_attention_body.h.

#include "paged_attention.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
#pragma GCC target("arch=x86-64-v4,avx512bf16")
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // in headers of GCC 12
#define WIDTH 16
#define PAIRS 1
#include "paged_attention_body.h"

const Attend quire_attend_bfloat16[3] = {nullptr, attend<ByVectors<bfloat16>>, nullptr};
#else
const Attend quire_attend_bfloat16[3] = {};
#endif
