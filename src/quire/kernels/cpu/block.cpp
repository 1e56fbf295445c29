// Decoder blocks in one call and one parallel region: norm, projection, rotation and the write of K and V, attention; or norm,
// projection, a mixer over its states; and the block's end, which also runs alone: projection, residual sum and norm, MLP or
// mixture of experts, residual sum. A block may lack the beginning with the first sum, or all behind that. Before and behind the blocks
// may stand what makes a model of them: rows of tokens, the last norm, the map to logits. Every number is that of the calls one by one;
// quire/kernels/block.py calls this through ctypes.
//
// Letters: as in block.h.
#include "block_experts.h"
#include "block_heads.h"
#include "block_mixer.h"
#include "model_ends.h"

extern "C" {

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

template <typename T, typename W, typename S>
struct Alone {
    End<T, W, S> end;
    std::atomic<int64_t> workers;
};

template <typename T, typename W, typename S>
void run_alone(void* data) {
    auto& alone = *(Alone<T, W, S>*)data;
    Worker worker(alone.workers);
    alone.end.go(worker, nullptr);
}

template <typename T, typename W, typename S = T>
int tail(const Block& block, void* y, const void* heads, int64_t heads_stride, const void* x, int64_t rows, int64_t threads) {
    static thread_local Room room;
    static thread_local ExpertsRoom experts;
    T* place = (T*)room.of(rows * end_room<T, S>(block) * sizeof(T) / sizeof(float) + 1);
    Memory own{0}, shared{0};
    count_experts<T>(block, rows, threads, own, shared);
    if (!place || !experts.take(own, shared)) return 1;
    const S* given = (const S*)x;
    Alone<T, W, S> call{{block, place, (S*)y, (const T*)heads, heads_stride, given, given, rows, threads, own, shared}, {0}};
    run_on(threads, run_alone<T, W, S>, &call, block.parallel);
    return call.end.failed();
}

// A number of numbers that ends at a multiple of four bytes.
int64_t even(int64_t count) { return (count + 1) / 2 * 2; }

template <typename T>
int64_t begin_room(const Step& step) { return !step.block->qkv ? 0 : even(step.block->mixer ? mixed_room<T>(*step.block) : heads_room(step)); }

// A block of a stack.
template <typename T, typename W, typename S>
struct Whole {
    enum Kind { HEADS, MIXED, NEITHER };
    union {
        Heads<T, W, S> heads;
        Mixed<T, W, S> mixed;
    };
    const Kind kind;
    End<T, W, S> end;

    // ``room``: as ``whole_room`` says. ``base``: as of End. ``own``, ``shared``: of a mixture of experts.
    Whole(const Step& step, T* room, S* y, const S* x, const S* base, int64_t rows, int64_t threads, Memory& own, Memory shared)
        : kind(!step.block->qkv ? NEITHER : step.block->mixer ? MIXED : HEADS),
          end(*step.block, room + rows * begin_room<T>(step), y, begin(step, room, x, rows, threads),
              step.block->out ? step.block->out->inputs : 0, x, base, rows, threads, own, shared) {}

    // Make the beginning; return its output.
    const T* begin(const Step& step, T* room, const S* x, int64_t rows, int64_t threads) {
        if (kind == NEITHER) return nullptr;
        if (kind == HEADS) return (new (&heads) Heads<T, W, S>(step, room, x, rows, threads))->out;
        const auto& states = *(const LayerStates*)step.layer;
        return (new (&mixed) Mixed<T, W, S>(*step.block, states, *(const Forward*)step.forward, room, x, rows, threads))->out;
    }

    const LinearCall* first() const { return kind == HEADS ? &heads.qkv : kind == MIXED ? &mixed.project : end.first(); }
    const LinearCall* second() const { return kind == NEITHER ? end.second() : end.first(); }

    bool go(Worker& worker, const LinearCall* next) {
        if (kind == HEADS && !heads.go(worker, end.first(), end.second())) return false;
        if (kind == MIXED && !mixed.go(worker, end.first(), end.second())) return false;
        return end.go(worker, next);
    }

    bool failed() const { return (kind == HEADS && heads.failed()) || (kind == MIXED && mixed.failed()) || end.failed(); }
};

template <typename T, typename S>
int64_t whole_room(const Step& step) { return even(begin_room<T>(step) + end_room<T, S>(*step.block)); }

template <typename T, typename W, typename S>
struct Stack {
    Whole<T, W, S>* blocks;
    int64_t count;
    Edges<T, W, S>* edges;  // or null
    std::atomic<int64_t> workers;
};

template <typename T, typename W, typename S>
void run_stack(void* data) {
    auto& stack = *(Stack<T, W, S>*)data;
    Worker worker(stack.workers);
    const LinearCall* behind = stack.edges ? &stack.edges->head : nullptr;
    if (stack.edges) {
        worker.expect(stack.blocks[0].first(), stack.blocks[0].second());
        do_rows(stack.edges->embed, worker);
    }
    for (int64_t i = 0; i < stack.count; i++)
        if (!stack.blocks[i].go(worker, i + 1 < stack.count ? stack.blocks[i + 1].first() : behind)) return;
    if (stack.edges) stack.edges->end(worker);
}

// With ``ends``: x are tokens, y logits, and ``first`` is written.
template <typename T, typename W, typename S = T>
int stack(const Ends* ends, const Step* steps, int64_t count, void* given_y, const void* given_x, int64_t* first, int64_t rows,
          int64_t threads) {
    static thread_local Room room, calls, around;
    static thread_local ExpertsRoom experts;
    int64_t most = 0, aside_width = 0;
    Memory own{0}, shared{0};
    for (int64_t i = 0; i < count; i++) {
        const Block& block = *steps[i].block;
        most = whole_room<T, S>(steps[i]) > most ? whole_room<T, S>(steps[i]) : most;
        aside_width = block.aside ? block.width : aside_width;
        count_experts<T>(block, rows, threads, own, shared);
    }
    const int64_t bytes = rows * (most * (int64_t)sizeof(T) + aside_width * (int64_t)sizeof(S));
    T* place = (T*)room.of(bytes / sizeof(float) + 1);
    auto* blocks = (Whole<T, W, S>*)calls.of((sizeof(Edges<T, W, S>) + count * sizeof(Whole<T, W, S>)) / sizeof(float) + 1);
    float* numbers = ends ? around.of(Edges<T, W, S>::floats(*ends, rows)) : nullptr;
    if (!place || !blocks || (ends && !numbers) || !experts.take(own, shared)) return 1;
    S *y = (S*)given_y, *aside = (S*)(place + rows * most);
    const S* x = (const S*)given_x;
    Edges<T, W, S>* edges = nullptr;
    if (ends) {
        edges = new (blocks + count) Edges<T, W, S>(*ends, numbers, (float*)given_y, (const int64_t*)given_x, rows, threads);
        x = y = edges->embed.out;
    }
    // A block reads x for the last time before it writes y, or with the same number.
    bool is_beside = false;
    for (int64_t i = 0; i < count; i++) {
        const bool aside_now = steps[i].block->aside;
        new (blocks + i) Whole<T, W, S>(steps[i], place, aside_now ? aside : y, x, is_beside ? aside : x, rows, threads, own, shared);
        is_beside = aside_now;
        if (!aside_now) x = y;
    }
    Stack<T, W, S> call{blocks, count, edges, {0}};
    run_on(threads, run_stack<T, W, S>, &call, steps->block->parallel);
    for (int64_t i = 0; i < count; i++)
        if (blocks[i].failed()) return 1;
    if (edges && edges->head.failed) return 1;
    if (edges) edges->find(first, rows);
    return 0;
}

int run_steps(const Ends* ends, const Step* steps, int64_t count, void* y, const void* x, int64_t* first, int64_t rows, int64_t threads) {
    const int64_t types = steps->block->types;
    return (types == 0   ? stack<float, float>
            : types == 1 ? stack<bfloat16, bfloat16>
            : types == 2 ? stack<bfloat16, float>
                         : stack<bfloat16, float, float>)(ends, steps, count, y, x, first, rows, threads);
}

}  // namespace

extern "C" {

// y = h + down(gated(gate_up(norm(h)))), or h + mixture(norm(h)), or h, with h = x + out(heads); x and y are [rows, E]. Return 0, or 1
// without memory.
int quire_block_tail(const Block* block, void* y, const void* heads, int64_t heads_stride, const void* x, int64_t rows,
                     int64_t threads) {
    return (block->types == 0   ? tail<float, float>
            : block->types == 1 ? tail<bfloat16, bfloat16>
            : block->types == 2 ? tail<bfloat16, float>
                                : tail<bfloat16, float, float>)(*block, y, heads, heads_stride, x, rows, threads);
}

// The same with heads = attention(qkv(norm(x))), whose K and V are written to the layer's pools, or mixer(projection(norm(x))), whose
// states are, or without heads, for so many blocks of one type, each over what the one before it has written.
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
