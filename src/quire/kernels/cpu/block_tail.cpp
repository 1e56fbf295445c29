// The end of a decoder block, from the heads of attention on, in one parallel region: projection, residual sum and norm, gated
// MLP, residual sum. Every number is that of the calls one by one; quire/kernels/block_tail.py calls this through ctypes.
//
// Threads do one thing after the other together. Each takes items until there are none, and goes on when all are done. So it is
// right for any number of threads, also for those that come late.
//
// Letters: M rows; E model width; F inner width of the MLP; C columns of all heads.
#include <sched.h>

#include "linear.h"
#include "rows.h"

extern "C" {

struct BlockTail {
    const Linear *out, *gate_up, *down;  // C to E, E to 2F, F to E
    const void* norm_weight;             // [E]
    Parallel parallel;
    int64_t types;       // of rows.cpp
    int64_t activation;  // of rows.cpp
    double eps;
};

}

namespace {

// Turns of a loop that waits, before it lets another thread have the core. A phase takes a few thousand at most.
constexpr int TURNS = 20000;

INLINE void wait_for(const std::atomic<int64_t>& done, int64_t count) {
    for (int turn = 0; done.load(std::memory_order_acquire) < count; turn++) {
        if (turn > TURNS) sched_yield();
#if defined(__x86_64__)
        else __builtin_ia32_pause();
#endif
    }
}

// Return false without memory. Who has none takes no item, so that nobody waits for it.
INLINE bool multiply(LinearCall& call, void (*run)(void*)) {
    run(&call);
    if (call.failed) return false;
    wait_for(call.done, call.items);
    return true;
}

template <typename Work>
INLINE void do_rows(Work& work) {
    runner<Work>()(&work);
    wait_for(work.rows.done, work.rows.count);
}

template <typename T, typename W, typename A>
struct Tail {
    LinearCall out, gate_up, down;
    void (*run)(void*);
    AddNorm<T, W> norm;
    Gated<T, A> gated;
    Sum<T> sum;
};

template <typename T, typename W, typename A>
void run_tail(void* data) {
    auto& tail = *(Tail<T, W, A>*)data;
    if (!multiply(tail.out, tail.run)) return;
    do_rows(tail.norm);
    if (!multiply(tail.gate_up, tail.run)) return;
    do_rows(tail.gated);
    if (!multiply(tail.down, tail.run)) return;
    do_rows(tail.sum);
}

template <typename T, typename W, typename A>
int tail(const BlockTail& block, T* y, const T* heads, int64_t heads_stride, const T* x, int64_t rows, int64_t threads) {
    static thread_local Room room;
    const int64_t width = block.out->outputs, inner = block.down->inputs;
    T* h = (T*)room.of(rows * (2 * width + 3 * inner) * sizeof(T) / sizeof(float) + 1);
    if (!h) return 1;
    T *normed = h + rows * width, *gate_up = normed + rows * width, *inside = gate_up + rows * 2 * inner;
    const int64_t piece = piece_of(width);
    Tail<T, W, A> call = {
        {}, {}, {}, nullptr,
        {{rows, piece}, normed, h, width, x, width, (const W*)block.norm_weight, width, (float)block.eps},
        {{rows, piece_of(inner)}, inside, gate_up, 2 * inner, inner},
        {{rows, piece}, y, h, width},
    };
    call.run = quire_begin_linear(&call.out, block.out, h, heads, heads_stride, rows, threads);
    quire_begin_linear(&call.gate_up, block.gate_up, gate_up, normed, width, rows, threads);
    quire_begin_linear(&call.down, block.down, y, inside, inner, rows, threads);
    run_on(threads, run_tail<T, W, A>, &call, block.parallel);
    return call.out.failed || call.gate_up.failed || call.down.failed;
}

template <typename T, typename W>
int tail_with(const BlockTail& block, void* y, const void* heads, int64_t heads_stride, const void* x, int64_t rows,
              int64_t threads) {
    return (block.activation == 0   ? tail<T, W, Silu>
            : block.activation == 1 ? tail<T, W, Gelu>
                                    : tail<T, W, GeluTanh>)(block, (T*)y, (const T*)heads, heads_stride, (const T*)x, rows, threads);
}

}  // namespace

extern "C" {

// y = h + down(gated(gate_up(norm(h)))), h = x + out(heads); x and y are [rows, E]. Return 0, or 1 without memory.
int quire_block_tail(const BlockTail* block, void* y, const void* heads, int64_t heads_stride, const void* x, int64_t rows,
                     int64_t threads) {
    return (block->types == 0   ? tail_with<float, float>
            : block->types == 1 ? tail_with<bfloat16, bfloat16>
                                : tail_with<bfloat16, float>)(*block, y, heads, heads_stride, x, rows, threads);
}
}
