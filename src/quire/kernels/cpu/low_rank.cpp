// The entry of low_rank.h.
#include "low_rank.h"

extern "C" int quire_rows_now;

extern "C" {

// ``parallel``: GOMP_parallel, or null. ``y_stride``, ``x_stride``: elements from row to row.
void quire_low_rank(const Work* work, void* y, int64_t y_stride, const void* x, int64_t x_stride, int64_t threads,
                    Parallel parallel) {
    Call call = {work, y, y_stride, x, x_stride, {0}, {0}};
    const int level = quire_rows_now;
    const RunCall* runs = level == 2 ? quire_low_rank_avx512 : level == 1 ? quire_low_rank_avx2 : quire_low_rank_portable;
    if (threads > work->num_blocks) threads = work->num_blocks;
    run_on(threads, runs[work->bfloat16 != 0], &call, parallel);
}
}
