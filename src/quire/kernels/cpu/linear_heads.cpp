// Linear maps of heads, each of columns of its own, in one parallel region. quire/kernels/linear/cpu_linear.py calls this.
//
// A head's product is that of linear.h, so a row has the same bits whatever other rows there are, on any number of threads.
#include <memory>
#include <new>

#include "linear.h"

namespace {

// Up to this many multiplications a call ends before a second thread begins.
constexpr int64_t ONE_THREAD = 1 << 16;

struct HeadCalls {
    LinearCall* calls;
    Multiply run;  // of all: they have one form
    int64_t heads, workers;
    std::atomic<int64_t> threads;
};

// Each thread begins at a head of its own, whose weights are neighbours, and then helps with those of other threads.
void run_heads(void* data) {
    HeadCalls& of = *(HeadCalls*)data;
    const int64_t thread = of.threads.fetch_add(1), first = thread * of.heads / of.workers;
    for (int64_t i = 0; i < of.heads; i++) of.run(&of.calls[(first + i) % of.heads], thread);
}

}  // namespace

extern "C" {

// Maps of one shape and form. Columns of a head follow each other; strides are elements from row to row, and from head to head.
// Return 0, or 1 without memory.
int quire_linear_heads(const Linear* const* maps, int64_t heads, void* y, int64_t y_stride, int64_t y_step, const void* x, int64_t x_stride,
                       int64_t x_step, int64_t rows, int64_t threads) {
    const Linear& map = *maps[0];
    const int64_t size = map.is_bfloat16 ? sizeof(bfloat16) : sizeof(float);
    if (rows * heads * map.inputs * map.outputs <= ONE_THREAD) threads = 1;
    std::unique_ptr<LinearCall[]> calls(new (std::nothrow) LinearCall[heads]);
    if (!calls) return 1;
    HeadCalls of = {calls.get(), nullptr, heads, threads, {0}};
    for (int64_t h = 0; h < heads; h++) {
        of.run = quire_begin_linear(&calls[h], maps[h], (char*)y + h * y_step * size, (const char*)x + h * x_step * size, x_stride, rows,
                                    (threads + heads - 1) / heads);
        calls[h].y_stride = y_stride;
    }
    run_on(threads, run_heads, &of, map.parallel);
    for (int64_t h = 0; h < heads; h++)
        if (calls[h].failed) return 1;
    return 0;
}
}
