// The products of linear.h with AVX2, FMA and F16C.
#define REGISTER 32
#include "linear.h"

#if defined(__x86_64__)
#include <immintrin.h>
TARGET_BEGIN("avx2,fma,f16c")

constexpr int MOST_ROWS = 6, MOST_SUMS = 12;

#include "linear_tiles.h"

extern "C" void quire_linear_avx2(LinearCall* call, int64_t thread) { run_call(*call, thread); }

TARGET_END
#endif
