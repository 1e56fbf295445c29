// The entry of linear.h: the machine's products, shared out to threads.
#include "linear.h"

extern "C" {
void quire_linear_portable(LinearCall*, int64_t);
void quire_linear_emulated(LinearCall*, int64_t);
#if defined(__x86_64__)
void quire_linear_avx2(LinearCall*, int64_t);
void quire_linear_avx512(LinearCall*, int64_t);
void quire_linear_bf16(LinearCall*, int64_t);
#if defined(__linux__)
void quire_linear_amx(LinearCall*, int64_t);
#endif
#endif
int quire_has_tiles();
}

namespace {

// Rows whose inputs stay in a cache while panels pass by.
constexpr int64_t TILE_ROWS = 144;  // a multiple of 6
// As many for tiles, which multiply 32 rows at once and faster, so that weights must come less often.
constexpr int64_t MANY_TILE_ROWS = 512;
enum Level { PORTABLE, AVX2, AVX512, AVX512_BF16, AMX, AMX_EMULATED };
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

// The best products of this processor: 0 portable, 1 AVX2, 2 AVX-512, 3 with products of bfloat16 pairs, 4 with tiles of bfloat16.
int quire_linear_level() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    // Every processor with AVX2 has F16C, whose name some compilers do not know here.
    const bool fma = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool wide = fma && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (wide && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bf16"))
        return quire_has_tiles() ? AMX : AVX512_BF16;
    return wide ? AVX512 : fma ? AVX2 : PORTABLE;
#else
    return PORTABLE;
#endif
}

// Whether pairs of bfloat16 are multiplied at half the rate of float32, as by Intel's processors whose tiles are absent or hidden.
int quire_slow_pairs() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    return quire_linear_level() == AVX512_BF16 && __builtin_cpu_is("intel");
#else
    return 0;
#endif
}

Multiply quire_begin_linear(LinearCall* call, const Linear* map, void* y, const void* x, int64_t x_stride, int64_t rows, int64_t threads) {
    // A step of tiles has a scale.
    const bool has_steps = map->form == BFLOAT16 || map->form == BLOCKS || (map->form >= INT8 && map->group % 32 == 0);
    const bool by_tiles = map->level >= AMX && map->is_bfloat16 && has_steps;
    const int64_t unit = by_tiles ? 32 : 6, most_rows = by_tiles ? MANY_TILE_ROWS : TILE_ROWS;
    const int64_t panels = (map->outputs + PANEL - 1) / PANEL, row_tiles = (rows + most_rows - 1) / most_rows;
    // At least three panels, of which two are read side by side, unless threads would have no work.
    int64_t parts = (ITEMS_OF_ONE * threads + row_tiles - 1) / row_tiles, most = panels / 3 > threads ? panels / 3 : panels < threads ? panels : threads;
    if (parts > most) parts = most;
    call->map = map, call->x = x, call->y = y, call->rows = rows, call->x_stride = x_stride, call->y_stride = map->outputs;
    // Equal tiles of whole blocks of rows.
    call->tile_rows = row_tiles > 1 ? (rows + unit * row_tiles - 1) / (unit * row_tiles) * unit : rows;
    call->parts = parts;
    call->items = parts * ((rows + call->tile_rows - 1) / call->tile_rows);
    call->ranges = threads < MOST_RANGES ? threads : MOST_RANGES;
    for (int64_t range = 0; range < call->ranges; range++) call->taken[range] = 0;
    call->done = 0, call->failed = 0;
    if (map->level == AMX_EMULATED) return by_tiles ? quire_linear_emulated : quire_linear_portable;
#if defined(__x86_64__)
#if defined(__linux__)
    if (by_tiles) return quire_linear_amx;
#endif
    if (map->level == AVX2) return quire_linear_avx2;
    if (map->level >= AVX512) return map->level == AVX512 || !map->is_bfloat16 ? quire_linear_avx512 : quire_linear_bf16;
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
