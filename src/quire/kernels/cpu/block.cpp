// A decoder block in one call, in three parallel regions: norm, projection, rotation and the write of K and V; attention; and the
// block's end, which also runs alone: projection, residual sum and norm, gated MLP, residual sum. Every number is that of the calls
// one by one; quire/kernels/block.py calls this through ctypes.
//
// Threads do one thing after the other together. Each takes items until there are none, and goes on when all are done. So it is
// right for any number of threads, also for those that come late.
//
// Letters: M rows; E model width; F inner width of the MLP; C columns of all heads.
#include <sched.h>

#include "linear.h"
#include "rows.h"

extern "C" {

// Weights of a block. ``types`` and ``activation`` are those of rows.cpp.
struct Block {
    const Linear *qkv, *out, *gate_up, *down;  // E to all heads of q, k, v; C to E; E to 2F; F to E. Of a tail qkv is null
    const void *attention_norm, *mlp_norm;     // [E]
    Parallel parallel;
    int64_t types, activation;
    double attention_eps, mlp_eps;
};

// What a layer of a KV state is made of.
struct LayerAttention {
    void *k, *v;                  // pools
    const float* sinks;           // as in paged_attention.h
    const void *q_norm, *k_norm;  // [Dk], or null
    int64_t heads, kv_heads, key_width, value_width;
    double head_eps, scale, softcap;
};

// What the layers of one class have in common in a forward.
struct ForwardAttention {
    const void* call;         // a planned Call of paged_attention.h
    const float *cos, *sin;   // of rows.cpp, or null
    int64_t turn_stride, rotary, interleaved;
    const int64_t* slots;
};

// A block of several that run one after the other.
struct Step {
    const Block* block;
    const LayerAttention* layer;
    const ForwardAttention* forward;
};

void quire_attention(const void* planned, const void* q, const void* q_sink, const void* k, const void* v, void* out, float* lse,
                     const float* sinks, double scale, double softcap, Parallel parallel);
}

namespace {

// Turns of a loop that waits, before it lets another thread have the core: some tens of microseconds.
constexpr int TURNS = 4000;

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
int tail(const Block& block, T* y, const T* heads, int64_t heads_stride, const T* x, int64_t rows, int64_t threads) {
    static thread_local Room room;
    const int64_t width = block.out->outputs, inner = block.down->inputs;
    T* h = (T*)room.of(rows * (2 * width + 3 * inner) * sizeof(T) / sizeof(float) + 1);
    if (!h) return 1;
    T *normed = h + rows * width, *gate_up = normed + rows * width, *inside = gate_up + rows * 2 * inner;
    const int64_t piece = piece_of(width);
    Tail<T, W, A> call = {
        {}, {}, {}, nullptr,
        {{rows, piece}, normed, h, width, x, width, (const W*)block.mlp_norm, width, (float)block.mlp_eps},
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
int tail_with(const Block& block, void* y, const void* heads, int64_t heads_stride, const void* x, int64_t rows, int64_t threads) {
    return (block.activation == 0   ? tail<T, W, Silu>
            : block.activation == 1 ? tail<T, W, Gelu>
                                    : tail<T, W, GeluTanh>)(block, (T*)y, (const T*)heads, heads_stride, (const T*)x, rows, threads);
}

template <typename T, typename W>
struct Front {
    Norm<T, W> norm;
    LinearCall qkv;
    void (*run)(void*);
    Place<T, W> place;
};

template <typename T, typename W>
void run_front(void* data) {
    auto& front = *(Front<T, W>*)data;
    do_rows(front.norm);
    if (multiply(front.qkv, front.run)) do_rows(front.place);
}

template <typename T, typename W>
int whole(const Block& block, const LayerAttention& layer, const ForwardAttention& forward, T* y, const T* x, int64_t rows,
          int64_t threads) {
    static thread_local Room room;
    const int64_t width = block.qkv->inputs, columns = block.qkv->outputs, key = layer.key_width;
    const int64_t all = layer.heads + layer.kv_heads, out = layer.heads * layer.value_width;
    T* normed = (T*)room.of(rows * (width + columns + all * key + out) * sizeof(T) / sizeof(float) + 1);
    if (!normed) return 1;
    T *qkv = normed + rows * width, *turned = qkv + rows * columns, *heads = turned + rows * all * key;
    Front<T, W> call = {
        {{rows, piece_of(width)}, normed, x, width, (const W*)block.attention_norm, width, (float)block.attention_eps},
        {}, nullptr,
        {{rows, piece_of(all * key)}, turned, qkv, columns, layer.heads, layer.kv_heads, key, layer.value_width, forward.cos,
         forward.sin, forward.turn_stride, forward.rotary, forward.interleaved, (const W*)layer.q_norm, (const W*)layer.k_norm,
         (float)layer.head_eps, (T*)layer.k, (T*)layer.v, forward.slots},
    };
    call.run = quire_begin_linear(&call.qkv, block.qkv, qkv, normed, width, rows, threads);
    run_on(threads, run_front<T, W>, &call, block.parallel);
    if (call.qkv.failed) return 1;
    quire_attention(forward.call, turned, nullptr, layer.k, layer.v, heads, nullptr, layer.sinks, layer.scale, layer.softcap,
                    block.parallel);
    return tail_with<T, W>(block, y, heads, out, x, rows, threads);
}

}  // namespace

extern "C" {

// y = h + down(gated(gate_up(norm(h)))), h = x + out(heads); x and y are [rows, E]. Return 0, or 1 without memory.
int quire_block_tail(const Block* block, void* y, const void* heads, int64_t heads_stride, const void* x, int64_t rows,
                     int64_t threads) {
    return (block->types == 0   ? tail_with<float, float>
            : block->types == 1 ? tail_with<bfloat16, bfloat16>
                                : tail_with<bfloat16, float>)(*block, y, heads, heads_stride, x, rows, threads);
}

// The same with heads = attention(qkv(norm(x))), whose K and V are written to the layer's pools.
int quire_block(const Block* block, const LayerAttention* layer, const ForwardAttention* forward, void* y, const void* x,
                int64_t rows, int64_t threads) {
    if (block->types == 0) return whole<float, float>(*block, *layer, *forward, (float*)y, (const float*)x, rows, threads);
    return (block->types == 1 ? whole<bfloat16, bfloat16> : whole<bfloat16, float>)(*block, *layer, *forward, (bfloat16*)y,
                                                                                    (const bfloat16*)x, rows, threads);
}

// So many blocks, each over what the one before it has written. A block reads x for the last time before it writes y.
int quire_blocks(const Step* steps, int64_t count, void* y, const void* x, int64_t rows, int64_t threads) {
    for (int64_t i = 0; i < count; i++, x = y)
        if (quire_block(steps[i].block, steps[i].layer, steps[i].forward, y, x, rows, threads)) return 1;
    return 0;
}
}
