// The products of linear_by_tiles.h on processors with tiles of bfloat16 (AMX), and whether this is one.
#include "linear.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16,avx2,fma")

#define PAIRS
#define WIDE
#include "linear_by_tiles.h"
#include "tiles_amx.h"

namespace {

typedef AmxTiles Tiles;

// Whether the processor has them, and the operating system lets this process use them.
bool may_use_tiles() {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return false;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (1u << 24 | 1u << 22)) != (1u << 24 | 1u << 22)) return false;
    unsigned low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    constexpr long ASK_FOR_STATE = 0x1023, TILE_DATA = 18;
    return (low & 3u << 17) == 3u << 17 && syscall(SYS_arch_prctl, ASK_FOR_STATE, TILE_DATA) == 0;
}

// Whether a product of small whole numbers is right, on all roads through linear_by_tiles.h.
bool tiles_are_right() {
    constexpr int64_t ROWS = 35, INPUTS = 562, OUTPUTS = 40, PANELS = 2;
    static bfloat16 x[ROWS * INPUTS], w[PANELS * INPUTS * PANEL], y[ROWS * OUTPUTS];
    for (int64_t i = 0; i < ROWS * INPUTS; i++) put_one(x + i, (float)(i * 7 % 9 - 4));
    for (int64_t i = 0; i < PANELS * INPUTS * PANEL; i++) put_one(w + i, (float)(i * 5 % 7 - 3));
    const Linear map = {w, nullptr, nullptr, nullptr, INPUTS, OUTPUTS, 0, BFLOAT16, 1, 4};
    LinearCall call;
    for (int64_t rows = ROWS; rows; rows = rows > 1) {
        quire_begin_linear(&call, &map, y, x, INPUTS, rows, 1);
        run_by_tiles<Tiles>(call, 0);
        for (int64_t m = 0; m < rows; m++)
            for (int64_t o = 0; o < OUTPUTS; o++) {
                float sum = 0;
                for (int64_t k = 0; k < INPUTS; k++)
                    sum += wide_one(x + m * INPUTS + k) * wide_one(w + ((o / PANEL * INPUTS + k / 2 * 2) * PANEL + o % PANEL * 2 + k % 2));
                bfloat16 wanted;
                put_one(&wanted, sum);
                if (y[m * OUTPUTS + o] != wanted) return false;
            }
    }
    return !call.failed;
}

}  // namespace

extern "C" {
void quire_linear_amx(LinearCall* call, int64_t thread) { run_form_by_tiles<Tiles>(*call, thread); }
int quire_has_tiles() {
    static const bool found = may_use_tiles() && tiles_are_right();
    return found;
}
}

TARGET_END
#else
extern "C" int quire_has_tiles() { return 0; }
#endif
