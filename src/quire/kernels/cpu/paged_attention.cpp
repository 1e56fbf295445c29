// Attention over pages on a CPU: shares a batch out into items of work, and runs them. See paged_attention.h.
//
// The reference is quire/ops/attention.py; quire/kernels/attention/cpu_attention.py calls this through ctypes.

#include "paged_attention.h"

#include <algorithm>
#include <new>
#include <vector>

namespace {

constexpr int64_t SHARED_TOKENS = 16;  // an entry of more new tokens reads its keys alone: its products take longer than reading
constexpr int64_t OWN_ROWS = 96, MOST_ROWS = 288;  // rows times G of an item, which share what is read
constexpr int64_t OWN_TOKENS = 64;                   // rows: more would see too many keys that the first ones do not see
constexpr int64_t FEW_ROWS = 32;                      // rows times G: up to so many, an item may be of several KV heads
constexpr int64_t SHARE = 2;                         // an item is at most this part of a thread's share of what is left

// Rows over splits, before heads and pieces.
struct Range {
    Item item;
    int64_t keys, cost;
};

struct Planner {
    Batch& batch;
    std::vector<Range> ranges;
    std::vector<int64_t> entry_of, shared;  // by row; ``shared``: splits from the first that are read with others
    const int64_t group = batch.heads / batch.kv_heads;

    // -- shared pages: rows whose tables agree from the first page on

    const int32_t* table(int64_t row) const { return batch.pages + batch.table_starts[entry_of[row]]; }

    // The pages of a split, if all of its keys are among those of the row's entry.
    bool whole(int64_t row, int64_t split) const { return batch.parts[0].stop[entry_of[row]] >= split_start(split + 1); }

    int compared(int64_t a, int64_t b, int64_t split) const {
        if (entry_of[a] == entry_of[b]) return 0;
        const int64_t size = batch.page_size, first = split_start(split) / size, last = (split_start(split + 1) + size - 1) / size;
        return std::memcmp(table(a) + first, table(b) + first, 4 * (last - first));
    }

    // The rows order[i..j - 1] read the splits first..split - 1 together: go on with those that share more.
    void share(int64_t i, int64_t j, int64_t first, int64_t split) {
        int64_t* order = batch.order;
        for (;; split++) {
            bool same = entry_of[order[i]] != entry_of[order[j - 1]];
            for (int64_t k = i; k < j && same; k++) same = whole(order[k], split) && compared(order[i], order[k], split) == 0;
            if (!same) break;
        }
        if (split > first) add_range(0, first == 0, i, j, first, split, 0, split_start(split));
        for (int64_t k = i; k < j; k++) shared[order[k]] = split;
        int64_t* more = std::stable_partition(order + i, order + j, [&](int64_t row) { return whole(row, split); });
        std::stable_sort(order + i, more, [&](int64_t a, int64_t b) { return compared(a, b, split) < 0; });
        for (int64_t k = i, end; k < more - order; k = end) {
            for (end = k + 1; end < more - order && compared(order[k], order[end], split) == 0;) end++;
            if (entry_of[order[k]] != entry_of[order[end - 1]]) share(k, end, split, split + 1);
        }
    }

    void add_range(int64_t part, bool leads, int64_t i, int64_t j, int64_t split, int64_t stop, int64_t first, int64_t last) {
        const int64_t most = std::max<int64_t>(1, MOST_ROWS / group);
        for (; i < j; i += most) {
            const int64_t rows = std::min(most, j - i), keys = last - std::max(first, split_start(split));
            ranges.push_back({{part, entry_of[batch.order[i]], i, rows, 0, 1, split, stop, first, last, leads}, keys, keys * (4 + rows * group)});
        }
    }

    // -- what is left

    // Keys that rows of one entry see, at or above ``from``.
    void hull(int64_t part_index, int64_t i, int64_t j, int64_t from, int64_t& first, int64_t& last) const {
        const Part& part = batch.parts[part_index];
        first = INT64_MAX, last = 0;
        for (int64_t k = i; k < j; k++) {
            const int64_t row = batch.order[k];
            if (part.low[row] < part.high[row]) first = std::min(first, part.low[row]), last = std::max(last, part.high[row]);
            if (part.columns && part.columns[3 * row + 1]) {
                const int64_t entry = entry_of[row], begin = part.columns[3 * row + 2];
                first = std::min(first, std::max(part.first[entry], begin));
                last = std::max(last, std::min(part.stop[entry], begin + BLOCK * part.columns[3 * row + 1]));
            }
        }
        first = std::max(first, from);
    }

    void add_own(int64_t i, int64_t j) {
        const int64_t row = batch.order[i], with_others = shared[row];
        int64_t first, last;
        hull(0, i, j, split_start(with_others), first, last);
        const bool empty = first >= last;
        const int64_t split = empty ? with_others : split_of(first), stop = empty ? with_others : split_of(last - 1) + 1;
        const int64_t lead = with_others ? 0 : split, count = std::max<int64_t>(1, stop - lead);
        if (!empty || !with_others) add_range(0, !with_others, i, j, split, stop, empty ? 0 : first, empty ? 0 : last);
        int64_t sink_first = 0, sink_last = 0;
        if (batch.num_parts > 1) hull(1, i, j, 0, sink_first, sink_last);
        int64_t sink_split = 0, sink_stop = 0;
        if (sink_first < sink_last) sink_split = split_of(sink_first), sink_stop = split_of(sink_last - 1) + 1;
        if (sink_split < sink_stop) add_range(1, false, i, j, sink_split, sink_stop, sink_first, sink_last);
        for (int64_t k = i; k < j; k++) {
            const int64_t t = batch.order[k];
            batch.shift[0][t] = -lead, batch.shift[1][t] = count - sink_split;
            batch.count[t] = count + sink_stop - sink_split;
        }
    }

    void make(int64_t threads) {
        const int64_t own = std::min(OWN_TOKENS, std::max<int64_t>(1, OWN_ROWS / group));
        entry_of.resize(batch.rows), shared.assign(batch.rows, 0);
        int64_t candidates = 0, last = batch.rows;
        for (int64_t e = 0; e < batch.entries; e++)
            for (int64_t t = batch.starts[e]; t < batch.starts[e + 1]; t++) {
                entry_of[t] = e;
                const bool few = batch.starts[e + 1] - batch.starts[e] <= SHARED_TOKENS;
                if (few && batch.parts[0].first[e] == 0 && whole(t, 0)) batch.order[candidates++] = t;
            }
        if (candidates && entry_of[batch.order[0]] != entry_of[batch.order[candidates - 1]]) share(0, candidates, 0, 0);
        for (int64_t k = 0; k < candidates; k++) batch.pieces[batch.order[k]] = -1;
        for (int64_t t = 0, k = candidates; t < batch.rows; t++)
            if (batch.pieces[t] != -1) batch.order[k++] = t;
        for (int64_t i = 0, j; i < last; i = j) {
            const int64_t row = batch.order[i];
            for (j = i + 1; j < last && j - i < own && entry_of[batch.order[j]] == entry_of[row] && shared[batch.order[j]] == shared[row];) j++;
            add_own(i, j);
        }
        cut(threads);
    }

    // -- items

    void cut(int64_t threads) {
        int64_t cost = 0;
        for (const Range& range : ranges) cost += range.cost * batch.kv_heads;
        if (cost * (batch.key_size + batch.value_size) < batch.one_thread) threads = 1;
        batch.threads = threads;
        std::stable_sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.cost > b.cost; });
        for (int64_t t = 0; t < batch.rows; t++) batch.pieces[t] = batch.skip[t] = 0;
        batch.num_items = 0;
        for (const Range& range : ranges) {
            const int64_t rows = range.item.rows * group, key_cost = range.keys ? range.cost / range.keys : 0;
            // With few rows memory is what limits: rows of all heads, which are neighbours there, are read together.
            const int64_t together = rows > FEW_ROWS ? 1 : std::min(batch.kv_heads, MOST_ROWS / rows);
            Item item = range.item;
            do {
                // Items become smaller towards the end, so that threads end at about the same time.
                const int64_t most = threads > 1 ? cost / (threads * SHARE) + 1 : INT64_MAX;
                const int64_t begin = std::max(split_start(item.split), item.first);
                const auto cost_of = [&](int64_t stop) { return (std::min(split_start(stop), item.last) - begin) * key_cost; };
                int64_t stop = item.split, heads = together;
                while (stop < range.item.stop && (stop == item.split || cost_of(stop + 1) * heads <= most)) stop++;
                while (heads > 1 && cost_of(stop) * heads > most) heads = (heads + 1) / 2;
                item.stop = stop;
                item.leads = range.item.leads && item.split == range.item.split;
                for (int64_t k = item.order; k < item.order + item.rows; k++) {
                    const int64_t row = batch.order[k];
                    batch.pieces[row]++;
                    if (item.leads) batch.skip[row] = std::max<int64_t>(1, stop - item.split);
                }
                batch.most_rows = std::max(batch.most_rows, heads * whole_tiles(rows, batch.key_size));
                for (int64_t head = 0; head < batch.kv_heads; head += heads, batch.num_items++) {
                    item.head = head, item.heads = std::min(heads, batch.kv_heads - head);
                    if (batch.num_items < batch.capacity) batch.items[batch.num_items] = item;
                }
                cost -= cost_of(stop) * batch.kv_heads;
                item.split = stop;
            } while (item.split < range.item.stop);
        }
        batch.num_states = 0;
        for (int64_t t = 0; t < batch.rows; t++) {
            batch.base[t] = batch.pieces[t] == 1 ? -1 : batch.num_states;
            if (batch.base[t] < 0) continue;
            batch.shift[0][t] += batch.num_states, batch.shift[1][t] += batch.num_states;
            batch.num_states += batch.count[t];
        }
    }
};

enum Level { PORTABLE, AVX2, AVX512, AVX512_BF16, AMX, AMX_EMULATED };
const Attend* const LEVELS[] = {quire_attend_portable, quire_attend_avx2,  quire_attend_avx512,
                                quire_attend_bfloat16, quire_attend_amx,   quire_attend_emulated};

Attend attend_of(const Call& call) {
    int64_t level = call.level;
    if (level >= AMX && (!LEVELS[level][call.type] || call.batch->key_size % 2)) level = level == AMX ? AVX512_BF16 : PORTABLE;
    return LEVELS[level][call.type] ? LEVELS[level][call.type] : LEVELS[level - 1][call.type];
}

}  // namespace

extern "C" {

int quire_has_tiles();  // linear_amx.cpp

// The best of LEVELS that this processor runs; never AMX_EMULATED.
int64_t quire_attention_level() {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("x86-64-v3")) return PORTABLE;
    if (!__builtin_cpu_supports("x86-64-v4")) return AVX2;
    if (!__builtin_cpu_supports("avx512bf16")) return AVX512;
    return quire_has_tiles() ? AMX : AVX512_BF16;
#else
    return PORTABLE;
#endif
}

int64_t quire_attention_plan(Batch* batch, int64_t threads) {
    try {
        batch->most_rows = 1;
        Planner planner{*batch, {}, {}, {}};
        for (int64_t t = 0; t < batch->rows; t++) batch->pieces[t] = 0;
        planner.make(threads);
        return batch->num_items;
    } catch (const std::bad_alloc&) {
        return -1;
    }
}

int64_t quire_attention_room(const Batch* batch) { return room_for(batch->most_rows, batch->key_size, batch->value_size); }

Attend quire_begin_attention(Call* call, const Call* planned, const void* q, const void* q_sink, const void* k, const void* v, void* out,
                             float* lse, const float* sinks, double scale, double softcap) {
    *call = *planned;
    call->q = q, call->q_sink = q_sink, call->k = k, call->v = v, call->out = out, call->lse = lse, call->sinks = sinks;
    call->scale = scale, call->softcap = softcap;
    call->next_item = call->next_room = call->done = 0;
    const Batch& batch = *call->batch;
    if (batch.num_states)
        for (int64_t t = 0; t < batch.rows; t++)
            for (int64_t head = 0; head < batch.kv_heads; head++) call->left[t * batch.kv_heads + head] = (int32_t)batch.pieces[t];
    return attend_of(*call);
}

// ``parallel``: GOMP_parallel, or null.
void quire_attention(const Call* planned, const void* q, const void* q_sink, const void* k, const void* v, void* out, float* lse,
                     const float* sinks, double scale, double softcap, Parallel parallel) {
    Call call;
    const Attend attend = quire_begin_attention(&call, planned, q, q_sink, k, v, out, lse, sinks, scale, softcap);
    run_on(std::min(call.batch->threads, call.batch->num_items), attend, &call, parallel);
}
}
