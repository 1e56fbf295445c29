// Structures of a call over blocks, and how the threads of its region go on together.
//
// Threads do one thing after the other together. Each takes items until there are none, and goes on when all are done. So it is
// right for any number of threads, also for those that come late. Who waits fetches the weights that come next.
//
// Letters: M rows; E model width; F inner width of the MLP; C columns of all heads; V vocabulary. Types: T of activations, W of norms'
// weights, S of the residual stream.

#pragma once

#include <sched.h>

#include <cmath>
#include <limits>
#include <new>

#include "linear.h"
#include "paged_attention.h"
#include "recurrence.h"
#include "rows.h"

extern "C" {

struct Mixture;  // of experts.h

// Weights of a block.
struct Block {
    // E to all heads of q, k, v; C to E; E to 2F, or F without gates; F to E. Of a tail qkv is null. A block without attention and mixer
    // has neither of the first two, one without a feed-forward part neither of the others.
    const Linear *qkv, *out, *gate_up, *down;
    const void *attention_norm, *mlp_norm;  // [E]
    Parallel parallel;
    int64_t types, width;  // types: those of rows.cpp, or 3: bfloat16 with norms and residuals in float32; width: E
    GateForm gate;
    double attention_eps, mlp_eps;
    // Norms of the outputs of attention and MLP before they are added. Any of the four norms may be null.
    const void *attention_out_norm, *mlp_out_norm;
    double attention_out_eps, mlp_out_eps;
    // Factors: of both outputs when they are added, of the input's norm, of the MLP's gates and output.
    double scale, mlp_scale, in_factor, gate_factor, down_factor;
    int64_t gated;        // attention: behind each query head of ``qkv`` is a gate of its size
    const Mixer* mixer;   // in place of attention, or null. Then ``qkv`` is its projection
    const Linear* rates;  // E to the rates of a delta rule, or to one gate for each head of attention; or null
    const Mixture* experts;  // in place of the gated MLP, whose two maps are null; or null
    const void* columns;     // factors of the columns of a mixer's projection, or null
    int64_t aside;  // 1: the next block has the same input, and adds to this one's sum
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

// What a layer with a mixer has in a KV state: pools as of recurrence.h.
struct LayerStates {
    void* kept;
    float* states;  // or null
};

// A block of several that run one after the other, with attention, a mixer or neither.
struct Step {
    const Block* block;
    const void* layer;    // LayerAttention, LayerStates or null
    const void* forward;  // ForwardAttention, Forward or null
};

// What makes a model of blocks.
struct Ends {
    const Linear* head;
    const void *norm, *table;  // [E]; [V, E], or null: a token's row is one of ``rows``, of FLOAT32, BFLOAT16 or BLOCKS
    const Linear* rows;
    int64_t vocabulary;
    double eps;
    double embedding_scale, logit_scale, softcap;  // factors; 0: no cap
};
}

namespace {

// Turns of a loop that waits, before it lets another thread have the core: some tens of microseconds.
constexpr int TURNS = 4000;
// Bytes of the next weights that a thread fetches while it waits: a part of its own cache.
constexpr int64_t FETCHED = 256 << 10;

// Who runs a region, and the weights that it multiplies next.
struct Worker {
    int64_t number;
    const char *next = nullptr, *end = nullptr;
    const LinearCall* then = nullptr;  // whose weights come behind those
    int64_t left = 0;                  // bytes to fetch

    explicit Worker(std::atomic<int64_t>& workers) : number(workers.fetch_add(1)) {}

    // Two products, or one; null: none.
    void expect(const LinearCall* call, const LinearCall* second = nullptr) {
        next = end = nullptr, left = FETCHED;
        if (call) begin(*call);
        then = second;
    }

    // This thread's range of items, each of which is some panels.
    void begin(const LinearCall& call) {
        const Linear& map = *call.map;
        const int64_t panels = (map.outputs + PANEL - 1) / PANEL, range = number % call.ranges;
        const auto place = [&](int64_t of) {
            const int64_t item = call.items * of / call.ranges;
            return (const char*)panel_place(map, panels * item / call.parts);
        };
        next = place(range), end = place(range + 1);
    }

    void wait(const int64_t& done, int64_t count) {
        for (int turn = 0; __atomic_load_n(&done, __ATOMIC_ACQUIRE) < count; turn++) {
            if (next < end && left > 0) {
                __builtin_prefetch(next, 0, 2);
                next += 64, left -= 64;
            } else if (then && left > 0) {
                begin(*then);
                then = nullptr;
            } else if (turn > TURNS)
                sched_yield();
#if defined(__x86_64__)
            else
                __builtin_ia32_pause();
#endif
        }
    }
};

// Return false without memory. Who has none takes no item, so that nobody waits for it.
INLINE bool multiply(LinearCall& call, Multiply run, Worker& worker) {
    run(&call, worker.number);
    if (call.failed) return false;
    worker.wait(call.done, call.items);
    return true;
}

template <typename Work>
INLINE void do_rows(Work& work, Worker& worker) {
    runner<Work>()(&work);
    worker.wait(work.rows.done, work.rows.count);
}

}  // namespace
