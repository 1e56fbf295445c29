// The entry of linear.h: the machine's products, shared out to threads.
#include "linear.h"

extern "C" {
void quire_linear_portable(LinearCall*, int64_t);
#if defined(__x86_64__)
void quire_linear_avx2(LinearCall*, int64_t);
void quire_linear_avx512(LinearCall*, int64_t);
void quire_linear_bf16(LinearCall*, int64_t);
#endif
}

namespace {

// Rows whose inputs stay in a cache while panels pass by.
constexpr int64_t TILE_ROWS = 144;  // a multiple of 6
// Items for each thread: so many that none waits long for another.
constexpr int64_t ITEMS_OF_ONE = 8;
// Up to this many multiplications a call ends before a second thread begins.
constexpr int64_t ONE_THREAD = 1 << 16;

// A product in a parallel region of its own.
struct Alone {
    LinearCall call;
    Multiply run;
    std::atomic<int64_t> threads;
};

void run_alone(void* data) {
    Alone& alone = *(Alone*)data;
    alone.run(&alone.call, alone.threads.fetch_add(1));
}

}  // namespace

extern "C" {

// The best products of this processor: 0 portable, 1 AVX2, 2 AVX-512, 3 with products of bfloat16 pairs.
int quire_linear_level() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool fma = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool wide = fma && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (wide && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bf16")) return 3;
    return wide ? 2 : fma ? 1 : 0;
#else
    return 0;
#endif
}

Multiply quire_begin_linear(LinearCall* call, const Linear* map, void* y, const void* x, int64_t x_stride, int64_t rows, int64_t threads) {
    const int64_t panels = (map->outputs + PANEL - 1) / PANEL, row_tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    // At least three panels, of which two are read side by side, unless threads would have no work.
    int64_t parts = (ITEMS_OF_ONE * threads + row_tiles - 1) / row_tiles, most = panels / 3 > threads ? panels / 3 : panels < threads ? panels : threads;
    if (parts > most) parts = most;
    call->map = map, call->x = x, call->y = y, call->rows = rows, call->x_stride = x_stride;
    // Equal tiles of whole blocks of rows.
    call->tile_rows = row_tiles > 1 ? (rows + 6 * row_tiles - 1) / (6 * row_tiles) * 6 : rows;
    call->parts = parts;
    call->items = parts * ((rows + call->tile_rows - 1) / call->tile_rows);
    call->ranges = threads < MOST_RANGES ? threads : MOST_RANGES;
    for (int64_t range = 0; range < call->ranges; range++) call->taken[range] = 0;
    call->done = 0, call->failed = 0;
#if defined(__x86_64__)
    if (map->level == 1) return quire_linear_avx2;
    if (map->level == 2 || (map->level == 3 && !map->is_bfloat16)) return quire_linear_avx512;
    if (map->level == 3) return quire_linear_bf16;
#endif
    return quire_linear_portable;
}

// Return 0, or 1 without memory.
int quire_linear(const Linear* map, void* y, const void* x, int64_t x_stride, int64_t rows, int64_t threads) {
    if (rows * map->inputs * map->outputs <= ONE_THREAD) threads = 1;
    Alone alone;
    alone.run = quire_begin_linear(&alone.call, map, y, x, x_stride, rows, threads);
    alone.threads = 0;
    run_on(threads < alone.call.items ? threads : alone.call.items, run_alone, &alone, map->parallel);
    return alone.call.failed;
}
}
