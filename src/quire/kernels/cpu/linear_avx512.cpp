// The products of linear.h with AVX-512.
#include "linear.h"

#if defined(__x86_64__)
// The undefined operands of its functions are warned about.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")

#define WIDE
constexpr int MOST_ROWS = 12, MOST_SUMS = 24;

#include "linear_tiles.h"

extern "C" void quire_linear_avx512(LinearCall* call, int64_t thread) { run_call(*call, thread); }

TARGET_END
#endif
