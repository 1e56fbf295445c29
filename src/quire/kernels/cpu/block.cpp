// Decoder blocks in one call and one parallel region: norm, projection, rotation and the write of K and V; attention; and the block's
// end, which also runs alone: projection, residual sum and norm, gated MLP, residual sum. Before and behind the blocks may stand what
// makes a model of them: rows of tokens, the last norm, the map to logits. Every number is that of the calls one by one;
// quire/kernels/block.py calls this through ctypes.
//
// Threads do one thing after the other together. Each takes items until there are none, and goes on when all are done. So it is
// right for any number of threads, also for those that come late. Who waits fetches the weights that come next.
//
// Letters: M rows; E model width; F inner width of the MLP; C columns of all heads; V vocabulary.
#include <sched.h>

#include <cmath>
#include <limits>
#include <new>

#include "linear.h"
#include "paged_attention.h"
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

// What makes a model of blocks.
struct Ends {
    const Linear* head;
    const void *norm, *table;  // [E]; [V, E], or null: a token's row is one of ``rows``, of FLOAT32, BFLOAT16 or BLOCKS
    const Linear* rows;
    int64_t vocabulary;
    double eps;
};

// Decodes of layers of one class: one new token of each sequence, at its length. Planned anew in the same place for each forward.
struct Decodes {
    Batch* batch;
    Call* call;
    ForwardAttention* forward;
    const int64_t *lengths, *sizes;  // [B]: tokens before, pages
    const float* turns;              // [positions, 2, rotary]: cos and sin, or null
    int64_t window;                  // keys that a token sees; 0: all
    int64_t room, states;            // bytes and floats that there are in the call's memory
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

template <typename T, typename W, typename A>
struct Tail {
    LinearCall out, gate_up, down;
    Multiply run;
    AddNorm<T, W> norm;
    Gated<T, A> gated;
    Sum<T> sum;

    // ``room``: rows * (2 E + 3 F) numbers.
    Tail(const Block& block, T* room, T* y, const T* heads, int64_t heads_stride, const T* x, int64_t rows, int64_t threads)
        : Tail(block, room, room + rows * block.out->outputs, room + 2 * rows * block.out->outputs,
               room + 2 * rows * (block.out->outputs + block.down->inputs), y, heads, heads_stride, x, rows, threads) {}

    Tail(const Block& block, T* h, T* normed, T* both, T* inside, T* y, const T* heads, int64_t heads_stride, const T* x, int64_t rows,
         int64_t threads)
        : norm{{rows, piece_of(block.out->outputs)}, normed, h, block.out->outputs, x, block.out->outputs, (const W*)block.mlp_norm,
               block.out->outputs, (float)block.mlp_eps},
          gated{{rows, piece_of(block.down->inputs)}, inside, both, 2 * block.down->inputs, block.down->inputs},
          sum{{rows, piece_of(block.out->outputs)}, y, h, block.out->outputs} {
        run = quire_begin_linear(&out, block.out, h, heads, heads_stride, rows, threads);
        quire_begin_linear(&gate_up, block.gate_up, both, normed, block.out->outputs, rows, threads);
        quire_begin_linear(&down, block.down, y, inside, block.down->inputs, rows, threads);
    }

    // ``next``: the product behind this block, or null.
    bool go(Worker& worker, const LinearCall* next) {
        worker.expect(&gate_up, &down);
        if (!multiply(out, run, worker)) return false;
        do_rows(norm, worker);
        worker.expect(&down, next);
        if (!multiply(gate_up, run, worker)) return false;
        do_rows(gated, worker);
        worker.expect(next);
        if (!multiply(down, run, worker)) return false;
        do_rows(sum, worker);
        return true;
    }

    bool failed() const { return out.failed || gate_up.failed || down.failed; }
};

int64_t tail_room(const Block& block) { return 2 * block.out->outputs + 3 * block.down->inputs; }

template <typename T, typename W, typename A>
struct Alone {
    Tail<T, W, A> tail;
    std::atomic<int64_t> workers;
};

template <typename T, typename W, typename A>
void run_alone(void* data) {
    auto& alone = *(Alone<T, W, A>*)data;
    Worker worker(alone.workers);
    alone.tail.go(worker, nullptr);
}

template <typename T, typename W, typename A>
int tail(const Block& block, T* y, const T* heads, int64_t heads_stride, const T* x, int64_t rows, int64_t threads) {
    static thread_local Room room;
    T* place = (T*)room.of(rows * tail_room(block) * sizeof(T) / sizeof(float) + 1);
    if (!place) return 1;
    Alone<T, W, A> call{{block, place, y, heads, heads_stride, x, rows, threads}, {0}};
    run_on(threads, run_alone<T, W, A>, &call, block.parallel);
    return call.tail.failed();
}

template <typename T, typename W>
int tail_with(const Block& block, void* y, const void* heads, int64_t heads_stride, const void* x, int64_t rows, int64_t threads) {
    return (block.activation == 0   ? tail<T, W, Silu>
            : block.activation == 1 ? tail<T, W, Gelu>
                                    : tail<T, W, GeluTanh>)(block, (T*)y, (const T*)heads, heads_stride, (const T*)x, rows, threads);
}

// A block of a stack.
template <typename T, typename W, typename A>
struct Whole {
    Norm<T, W> norm;
    LinearCall qkv;
    Multiply run;
    Place<T, W> place;
    Call attention;
    Attend attend;
    Tail<T, W, A> tail;

    // ``room``: as ``whole_room`` says.
    Whole(const Step& step, T* room, T* y, const T* x, int64_t rows, int64_t threads)
        : Whole(*step.block, *step.layer, *step.forward, room, room + rows * step.block->qkv->inputs,
                room + rows * (step.block->qkv->inputs + step.block->qkv->outputs), y, x, rows, threads) {}

    Whole(const Block& block, const LayerAttention& layer, const ForwardAttention& forward, T* normed, T* all, T* turned, T* y, const T* x,
          int64_t rows, int64_t threads)
        : Whole(block, layer, forward, normed, all, turned, turned + rows * (layer.heads + layer.kv_heads) * layer.key_width,
                block.qkv->inputs, layer.heads * layer.value_width, y, x, rows, threads) {}

    Whole(const Block& block, const LayerAttention& layer, const ForwardAttention& forward, T* normed, T* all, T* turned, T* heads,
          int64_t width, int64_t columns, T* y, const T* x, int64_t rows, int64_t threads)
        : norm{{rows, piece_of(width)}, normed, x, width, (const W*)block.attention_norm, width, (float)block.attention_eps},
          place{{rows, piece_of((layer.heads + layer.kv_heads) * layer.key_width)}, turned, all, block.qkv->outputs, layer.heads,
                layer.kv_heads, layer.key_width, layer.value_width, forward.cos, forward.sin, forward.turn_stride, forward.rotary,
                forward.interleaved, (const W*)layer.q_norm, (const W*)layer.k_norm, (float)layer.head_eps, (T*)layer.k, (T*)layer.v,
                forward.slots},
          tail(block, heads + rows * columns, y, heads, columns, x, rows, threads) {
        run = quire_begin_linear(&qkv, block.qkv, all, normed, width, rows, threads);
        attend = quire_begin_attention(&attention, (const Call*)forward.call, turned, nullptr, layer.k, layer.v, heads, nullptr,
                                       layer.sinks, layer.scale, layer.softcap);
    }

    bool go(Worker& worker, const LinearCall* next) {
        do_rows(norm, worker);
        worker.expect(&tail.out, &tail.gate_up);
        if (!multiply(qkv, run, worker)) return false;
        do_rows(place, worker);
        attend(&attention);
        worker.wait(attention.done, attention.batch->num_items);
        return tail.go(worker, next);
    }

    bool failed() const { return qkv.failed || tail.failed(); }
};

int64_t whole_room(const Step& step) {
    const LayerAttention& layer = *step.layer;
    return step.block->qkv->inputs + step.block->qkv->outputs + (layer.heads + layer.kv_heads) * layer.key_width +
           layer.heads * layer.value_width + tail_room(*step.block);
}

template <typename T>
struct Embed {
    Rows rows;
    T* out;
    const int64_t* tokens;
    const T* table;
    const Linear* map;  // without a table
};

template <typename T>
INLINE void run_row(const Embed<T>& work, int64_t row) {
    const int64_t width = work.map->inputs, token = work.tokens[row], start = token / PANEL * PANEL * width, column = token % PANEL;
    T* to = work.out + row * width;
    if (work.table)
        copy(to, work.table + token * width, width);
    else if (work.map->form == BLOCKS) {
        const uint8_t* panel = panel_place(*work.map, token / PANEL);
        const int64_t kind = block_part(*work.map, token / PANEL).kind;
        for (int64_t i = 0; i < width; i++) put_one(to + i, block_value(kind, panel, i, column));
    } else if (work.map->form == FLOAT32)
        for (int64_t i = 0; i < width; i++) put_one(to + i, ((const float*)work.map->weights)[start + i * PANEL + column]);
    else
        for (int64_t i = 0; i < width; i++)
            put_one(to + i, wide_one((const bfloat16*)work.map->weights + start + i / 2 * 2 * PANEL + 2 * column + i % 2));
}

// Logits of a piece of a row that are looked at together.
constexpr int64_t LOOKED_AT = 4096;

// Logits in float32, and the first maximum of each piece: NaN if one of them is no number.
template <typename T>
struct Logits {
    Rows rows;  // pieces
    float* out;
    const T* x;  // may be ``out``
    int64_t width, pieces;
    float* most;
    int32_t* place;
};

template <typename T>
INLINE void run_row(const Logits<T>& work, int64_t item) {
    const int64_t first = item % work.pieces * LOOKED_AT, count = work.width - first < LOOKED_AT ? work.width - first : LOOKED_AT;
    const T* x = work.x + item / work.pieces * work.width + first;
    float* out = work.out + item / work.pieces * work.width + first;
    Lanes most = Lanes{} - std::numeric_limits<float>::infinity();
    Ints at = {}, here = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    Bits none = {};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES, here += LANES) {
        const Lanes value = wide(x + i);
        put(out + i, value);
        none |= no_number(value);
        const Bits more = negative(most - value + 0.f);  // + 0: the zeros are equal
        most = chosen(more, value, most), at = chosen(more, here, at);
    }
    float best = -std::numeric_limits<float>::infinity();
    int32_t place = 0;
    uint32_t bad = 0;
    for (int j = 0; j < LANES; j++) {
        bad |= none[j];
        if (most[j] > best || (most[j] == best && at[j] < place)) best = most[j], place = at[j];
    }
    for (; i < count; i++) {
        out[i] = wide_one(x + i);
        bad |= out[i] != out[i];
        if (out[i] > best) best = out[i], place = (int32_t)i;
    }
    work.most[item] = bad ? std::numeric_limits<float>::quiet_NaN() : best;
    work.place[item] = (int32_t)first + place;
}

// What stands before and behind the blocks.
template <typename T, typename W>
struct Edges {
    Embed<T> embed;
    Norm<T, W> norm;
    LinearCall head;
    Multiply run;
    Logits<T> logits;

    static int64_t pieces(const Ends& ends) { return (ends.head->outputs + LOOKED_AT - 1) / LOOKED_AT; }

    static int64_t floats(const Ends& ends, int64_t rows) {
        const int64_t numbers = 2 * ends.head->inputs + (sizeof(T) < sizeof(float) ? ends.head->outputs : 0);
        return rows * (2 * pieces(ends)) + rows * numbers * sizeof(T) / sizeof(float) + 1;
    }

    Edges(const Ends& ends, float* room, float* out, const int64_t* tokens, int64_t rows, int64_t threads)
        : Edges(ends, room, (T*)(room + 2 * rows * pieces(ends)), ends.head->inputs, out, tokens, rows, threads) {}

    Edges(const Ends& ends, float* most, T* x, int64_t width, float* out, const int64_t* tokens, int64_t rows, int64_t threads)
        : embed{{rows, piece_of(width)}, x, tokens, (const T*)ends.table, ends.rows},
          norm{{rows, piece_of(width)}, x + rows * width, x, width, (const W*)ends.norm, width, (float)ends.eps},
          logits{{rows * pieces(ends), 1}, out, sizeof(T) < sizeof(float) ? x + 2 * rows * width : (const T*)out, ends.head->outputs,
                 pieces(ends), most, (int32_t*)(most + rows * pieces(ends))} {
        run = quire_begin_linear(&head, ends.head, (void*)logits.x, norm.out, width, rows, threads);
    }

    void end(Worker& worker) {
        do_rows(norm, worker);
        worker.expect(nullptr);
        if (multiply(head, run, worker)) do_rows(logits, worker);
    }

    // Where the first maximum of each row is; -1 if it is not finite.
    void find(int64_t* first, int64_t rows) const {
        for (int64_t row = 0; row < rows; row++) {
            float best = -std::numeric_limits<float>::infinity();
            first[row] = -1;
            for (int64_t item = row * logits.pieces; item < (row + 1) * logits.pieces; item++)
                if (!(logits.most[item] <= best)) {
                    best = logits.most[item], first[row] = logits.place[item];
                    if (!std::isfinite(best)) {
                        first[row] = -1;
                        break;
                    }
                }
        }
    }
};

template <typename T, typename W, typename A>
struct Stack {
    Whole<T, W, A>* blocks;
    int64_t count;
    Edges<T, W>* edges;  // or null
    std::atomic<int64_t> workers;
};

template <typename T, typename W, typename A>
void run_stack(void* data) {
    auto& stack = *(Stack<T, W, A>*)data;
    Worker worker(stack.workers);
    LinearCall* behind = stack.edges ? &stack.edges->head : nullptr;
    if (stack.edges) {
        worker.expect(&stack.blocks[0].qkv, &stack.blocks[0].tail.out);
        do_rows(stack.edges->embed, worker);
    }
    for (int64_t i = 0; i < stack.count; i++)
        if (!stack.blocks[i].go(worker, i + 1 < stack.count ? &stack.blocks[i + 1].qkv : behind)) return;
    if (stack.edges) stack.edges->end(worker);
}

// With ``ends``: x are tokens, y logits, and ``first`` is written.
template <typename T, typename W, typename A>
int stack(const Ends* ends, const Step* steps, int64_t count, void* given_y, const void* given_x, int64_t* first, int64_t rows,
          int64_t threads) {
    static thread_local Room room, calls, around;
    int64_t most = 0;
    for (int64_t i = 0; i < count; i++) most = whole_room(steps[i]) > most ? whole_room(steps[i]) : most;
    T* place = (T*)room.of(rows * most * sizeof(T) / sizeof(float) + 1);
    auto* blocks = (Whole<T, W, A>*)calls.of((sizeof(Edges<T, W>) + count * sizeof(Whole<T, W, A>)) / sizeof(float) + 1);
    float* numbers = ends ? around.of(Edges<T, W>::floats(*ends, rows)) : nullptr;
    if (!place || !blocks || (ends && !numbers)) return 1;
    T* y = (T*)given_y;
    const T* x = (const T*)given_x;
    Edges<T, W>* edges = nullptr;
    if (ends) {
        edges = new (blocks + count) Edges<T, W>(*ends, numbers, (float*)given_y, (const int64_t*)given_x, rows, threads);
        x = y = edges->embed.out;
    }
    // A block reads x for the last time before it writes y.
    for (int64_t i = 0; i < count; i++) new (blocks + i) Whole<T, W, A>(steps[i], place, y, i ? y : x, rows, threads);
    Stack<T, W, A> call{blocks, count, edges, {0}};
    run_on(threads, run_stack<T, W, A>, &call, steps->block->parallel);
    for (int64_t i = 0; i < count; i++)
        if (blocks[i].failed()) return 1;
    if (edges && edges->head.failed) return 1;
    if (edges) edges->find(first, rows);
    return 0;
}

template <typename T, typename W>
int stack_with(const Ends* ends, const Step* steps, int64_t count, void* y, const void* x, int64_t* first, int64_t rows, int64_t threads) {
    return (steps->block->activation == 0   ? stack<T, W, Silu>
            : steps->block->activation == 1 ? stack<T, W, Gelu>
                                            : stack<T, W, GeluTanh>)(ends, steps, count, y, x, first, rows, threads);
}

int run_steps(const Ends* ends, const Step* steps, int64_t count, void* y, const void* x, int64_t* first, int64_t rows, int64_t threads) {
    const int64_t types = steps->block->types;
    return (types == 0   ? stack_with<float, float>
            : types == 1 ? stack_with<bfloat16, bfloat16>
                         : stack_with<bfloat16, float>)(ends, steps, count, y, x, first, rows, threads);
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

// The same with heads = attention(qkv(norm(x))), whose K and V are written to the layer's pools, for so many blocks of one type and
// activation, each over what the one before it has written.
int quire_blocks(const Step* steps, int64_t count, void* y, const void* x, int64_t rows, int64_t threads) {
    return run_steps(nullptr, steps, count, y, x, nullptr, rows, threads);
}

// A model of such blocks: logits [rows, V] of tokens, and of each row where its first maximum is, or -1 if that is not finite.
// Return 2, and do nothing, if there is no such token.
int quire_model(const Ends* ends, const Step* steps, int64_t count, float* logits, int64_t* first, const int64_t* tokens, int64_t rows,
                int64_t threads) {
    for (int64_t row = 0; row < rows; row++)
        if (tokens[row] < 0 || tokens[row] >= ends->vocabulary) return 2;
    return run_steps(ends, steps, count, logits, tokens, first, rows, threads);
}

// Return 0, 1 if the call's memory is too small, which then has the sizes that are needed in its batch and ``room_size``, or -1
// without memory.
int quire_plan_decodes(Decodes* decodes, int64_t threads) {
    Batch& batch = *decodes->batch;
    Call& call = *decodes->call;
    ForwardAttention& forward = *decodes->forward;
    // What the planner reads is this structure's own.
    auto *low = (int64_t*)batch.parts[0].low, *high = (int64_t*)batch.parts[0].high, *tables = (int64_t*)batch.table_starts;
    auto* slots = (int64_t*)forward.slots;
    for (int64_t t = 0; t < batch.rows; t++) {
        const int64_t length = decodes->lengths[t];
        tables[t + 1] = tables[t] + decodes->sizes[t];
        high[t] = length + 1;
        low[t] = decodes->window && high[t] > decodes->window ? high[t] - decodes->window : 0;
        slots[t] = batch.pages[tables[t + 1] - 1] * batch.page_size + length % batch.page_size;
        if (decodes->turns)
            copy((float*)forward.cos + t * forward.turn_stride, decodes->turns + length * forward.turn_stride, forward.turn_stride);
    }
    const int64_t items = quire_attention_plan(&batch, threads);
    if (items < 0) return -1;
    call.room_size = quire_attention_room(&batch);
    return items > batch.capacity || batch.threads * call.room_size > decodes->room ||
           batch.num_states * batch.heads * call.state_size > decodes->states;
}
}
