// The products of linear.h with AVX-512 and its products of bfloat16 pairs, for rows of bfloat16.
#include "linear.h"

#if defined(__x86_64__)
// The undefined operands of its functions are warned about.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16,avx2,fma,prfchw")

#define PAIRS
#define WIDE
constexpr int MOST_ROWS = 12;

#include "linear_tiles.h"

extern "C" void quire_linear_bf16(LinearCall* call, int64_t thread) { run_form<uint32_t, bfloat16>(*call, thread); }

TARGET_END
#endif
