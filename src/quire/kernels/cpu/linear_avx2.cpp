// The products of linear.h with AVX2 and FMA.
#include "linear.h"

#if defined(__x86_64__)
TARGET_BEGIN("avx2,fma")

constexpr int MOST_ROWS = 4;

#include "linear_tiles.h"

extern "C" void quire_linear_avx2(LinearCall* call, int64_t thread) { run_call(*call, thread); }

TARGET_END
#endif
