// The products of linear.h with AVX-512 and its products of bfloat16 pairs, for rows of bfloat16.
#include "linear.h"

#if defined(__x86_64__)
// The undefined operands of its functions are warned about.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16,avx2,fma,prfchw")

#define PAIRS
#define WIDE
constexpr int MOST_ROWS = 12, MOST_SUMS = 24;

#include "linear_tiles.h"
#include "linear_code_pairs.h"

extern "C" int quire_slow_pairs();  // linear.cpp

namespace {

__attribute__((noinline)) void by_pairs(LinearCall& call, int64_t thread) {
    switch (call.map->form) {
        case FLOAT32: return run_items<FLOAT32, float, bfloat16>(call, thread);
        case BFLOAT16: return run_items<BFLOAT16, uint32_t, bfloat16>(call, thread);
        case INT8: return run_items<INT8, uint32_t, bfloat16>(call, thread);
        case INT4: return run_items<INT4, uint32_t, bfloat16>(call, thread);
        default: return run_codes<ByPairs>(call, thread);
    }
}

}  // namespace

// The product of a pair is two of float32, the second input's first, with numbers below 2^-126 as 0. So many rows of codes are
// multiplied by floats to the same bits, which is faster where pairs are slow; a few rows are not, whose codes become pairs sooner.
extern "C" void quire_linear_bf16(LinearCall* call, int64_t thread) {
    static const bool are_slow = quire_slow_pairs();
    constexpr unsigned BELOW_AS_ZERO = 0x8040;  // of results and of operands
    const int64_t form = call->map->form;
    if (!are_slow || (form != INT8 && form != INT4)) return by_pairs(*call, thread);
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | BELOW_AS_ZERO);
    if (call->rows <= FEW_ROWS)
        by_pairs(*call, thread);
    else if (form == INT8)
        run_items<INT8, float, bfloat16, true>(*call, thread);
    else
        run_items<INT4, float, bfloat16, true>(*call, thread);
    _mm_setcsr(before);
}

TARGET_END
#endif
