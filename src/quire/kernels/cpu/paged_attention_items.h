// Items of work: where their rows of K and V are, the order of their splits and blocks, and what becomes of their states. The products
// of a block and its weights are those of ``Products``: ByVectors (paged_attention_body.h) or ByTiles (paged_attention_tiles.h).

#include "paged_attention_rows.h"

namespace {

// -- states ------------------------------------------------------------------------------------------------------------

// A state as it is merged and kept: the numbers times the sum, the largest score times log2(e), the sum.
struct Tail {
    float top, sum;
};

// a = a merged with b, which is behind it. A state without keys (-inf, 0, zeros) changes no bit.
__attribute__((noinline)) void merge(float* a, Tail& a_tail, const float* b, Tail b_tail, int64_t columns) {
    float top = a_tail.top > b_tail.top ? a_tail.top : b_tail.top;
    float shift = top == NOTHING ? 0.0f : top;
    float one = exp2_one(a_tail.top - shift), other = exp2_one(b_tail.top - shift);
    a_tail.top = top, a_tail.sum = a_tail.sum * one + b_tail.sum * other;
    for (int64_t d = 0; d < columns; d += W) {
        Vector kept = loaded<Vector>(a + d) * one;
        store(a + d, kept + loaded<Vector>(b + d) * other);
    }
}

// The result of a row and head.
template <typename T>
INLINE void finish(const Call& call, int64_t row, int64_t head, const float* sums, Tail tail, float* spare) {
    const Batch& batch = *call.batch;
    const int64_t size = batch.value_size, place = row * batch.heads + head;
    const bool empty = tail.sum == 0.0f;
    if (call.lse) call.lse[place] = empty ? NOTHING : tail.top * LN2 + __builtin_logf(tail.sum);
    float shrink = 1.0f, sum = tail.sum;
    if (call.sinks) {
        float logit = call.sinks[head] * LOG2E, top = tail.top > logit ? tail.top : logit;
        shrink = exp2_one(tail.top - top);
        sum = sum * shrink + exp2_one(logit - top);
    }
    float factor = empty ? 0.0f : shrink / sum;
    T* out = (T*)call.out + place * size;
    int64_t d = 0;
    for (; d + W <= size; d += W) put_vector(out + d, loaded<Vector>(sums + d) * factor);
    if (d < size) {
        put_vector((T*)spare, loaded<Vector>(sums + d) * factor);
        std::memcpy(out + d, spare, (size - d) * sizeof(T));
    }
}

// -- items -------------------------------------------------------------------------------------------------------------

// Scratch of one thread that all products have. ``columns``: Dv up to a multiple of W.
struct Room {
    float *merged, *spare;
    Tail* tails;
    uint64_t* seen;
    char *zeros, *k_copies, *v_copies;
    int64_t columns;
};

// Hands out a thread's scratch.
struct Taker {
    char* at;
    template <typename T>
    T* take(int64_t bytes) {
        char* found = at;
        at += (bytes + 63) / 64 * 64;
        return (T*)found;
    }
};

template <typename T>
INLINE Room rooms(const Batch& batch, Taker& taker) {
    Room room;
    const int64_t rows = batch.most_rows, longer = batch.key_size > batch.value_size ? batch.key_size : batch.value_size;
    room.columns = (batch.value_size + W - 1) / W * W;
    room.merged = taker.take<float>(4 * rows * room.columns), room.tails = taker.take<Tail>(sizeof(Tail) * rows);
    room.seen = taker.take<uint64_t>(8 * rows);
    room.k_copies = taker.take<char>(BLOCK * batch.key_size * sizeof(T));
    room.v_copies = taker.take<char>(BLOCK * batch.value_size * sizeof(T));
    room.zeros = taker.take<char>(longer * sizeof(T)), room.spare = taker.take<float>(4 * W);
    std::memset(room.zeros, 0, longer * sizeof(T));
    return room;
}

// Keys of a block that a row sees, as bits.
INLINE uint64_t sight(const Part& part, int64_t row, int64_t block) {
    int64_t low = part.low[row] - block, high = part.high[row] - block;
    low = low < 0 ? 0 : low, high = high > BLOCK ? BLOCK : high;
    uint64_t seen = low < high ? ~(uint64_t)0 >> (BLOCK - (high - low)) << low : 0;
    if (part.columns) {
        const int64_t* columns = part.columns + 3 * row;
        int64_t word = (block - columns[2]) / BLOCK;
        if (block >= columns[2] && word < columns[1]) seen |= part.bits[columns[0] + word];
    }
    return seen;
}

// The slot of an address; -1 on a null page.
INLINE int64_t slot_of(const Batch& batch, const int32_t* pages, int64_t address) {
    const int64_t page = pages[address / batch.page_size];
    return page < 0 ? -1 : page * batch.page_size + address % batch.page_size;
}

// The first slot of GROUP keys that all are seen and lie one behind the other; -1 if they do not.
INLINE int64_t run_of(const Batch& batch, const int32_t* pages, int64_t address, uint64_t seen) {
    constexpr uint64_t EVERY = ((uint64_t)1 << GROUP) - 1;
    if ((seen & EVERY) != EVERY) return -1;
    const int64_t slot = slot_of(batch, pages, address), size = batch.page_size;
    if (slot < 0 || address % size + GROUP <= size) return slot;
    for (int64_t i = 1; i < GROUP; i++)
        if (slot_of(batch, pages, address + i) != slot + i) return -1;
    return slot;
}

struct Places {
    int64_t slots[BLOCK / GROUP];  // of the groups of a block, -1: rows are copied, so that those that nobody sees are zeros
};

INLINE Places places_of(const Batch& batch, const int32_t* pages, int64_t block, uint64_t seen) {
    Places places;
    for (int64_t g = 0; g < BLOCK / GROUP; g++)
        places.slots[g] = run_of(batch, pages, block + g * GROUP, seen >> (g * GROUP));
    return places;
}

// Where a block's rows of head ``h`` of an item are. Those that nobody sees, and null pages, are zeros, and are not read. ``slabs``:
// how many heads' rows are one piece of memory, which is prefetched from first to last; 0: the head's own rows are.
INLINE void find_rows(const Batch& batch, const int32_t* pages, int64_t block, uint64_t seen, const Places& places, const Places& next,
                      const char* x, int64_t slot_bytes, int64_t bytes, int64_t h, int64_t slabs, const char* zeros, char* copies,
                      Rows* groups) {
    for (int64_t g = 0; g < BLOCK / GROUP; g++, copies += GROUP * bytes) {
        Rows& rows = groups[g];
        const uint64_t some = seen >> (g * GROUP) & (((uint64_t)1 << GROUP) - 1);
        const int64_t place = h * (BLOCK / GROUP) + g, slot = next.slots[slabs ? place / slabs : g];
        rows.next = slot < 0 ? zeros : x + slot * slot_bytes + (slabs ? (place % slabs * GROUP - h) * bytes : 0);
        rows.next_stride = slot < 0 ? 0 : slabs ? bytes : slot_bytes;
        if (places.slots[g] >= 0) {
            rows.at = x + places.slots[g] * slot_bytes, rows.stride = slot_bytes;
        } else if (!some) {
            rows.at = zeros, rows.stride = 0;
        } else {
            rows.at = copies, rows.stride = bytes;
            for (int64_t i = 0; i < GROUP; i++) {
                const int64_t slot = some >> i & 1 ? slot_of(batch, pages, block + g * GROUP + i) : -1;
                std::memcpy(copies + i * bytes, slot < 0 ? zeros : x + slot * slot_bytes, bytes);
            }
        }
    }
}

// Fetch the rows of a block under an item's heads, which nobody has fetched while reading the block before.
INLINE void fetch_block(const Places& places, const char* x, int64_t slot_bytes, int64_t head_bytes, int64_t bytes, int64_t heads) {
    for (int64_t slot : places.slots) {
        if (slot < 0) continue;
        const char* from = x + slot * slot_bytes;
        if (heads * bytes == slot_bytes) {
            for (int64_t at = 0; at < GROUP * slot_bytes; at += 64) __builtin_prefetch(from + at, 0, 2);
            continue;
        }
        for (int64_t i = 0; i < GROUP; i++, from += slot_bytes)
            for (int64_t h = 0; h < heads; h++)
                for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + h * head_bytes + at, 0, 2);
    }
}

// Keys of a block that some row of an item may see, as bits; to fetch what nobody sees does no harm.
INLINE uint64_t likely(const Item& item, int64_t block) {
    const int64_t rest = item.last - block;
    return rest <= 0 ? 0 : rest < BLOCK ? ~(uint64_t)0 >> (BLOCK - rest) : ~(uint64_t)0;
}

// The first block of an item.
INLINE Places first_places(const Batch& batch, const Item& item) {
    const int64_t start = split_start(item.split), block = (item.first > start ? item.first : start) / BLOCK * BLOCK;
    return places_of(batch, batch.pages + batch.table_starts[item.entry], block, likely(item, block));
}

// ``fetched``: the item whose first block the one before has fetched.
template <class Products>
INLINE void run_item(Call& call, int64_t index, int64_t& fetched, Products& products) {
    typedef typename Products::Number T;
    Room& room = products.room;
    const Batch& batch = *call.batch;
    const Item& item = batch.items[index];
    const Part& part = batch.parts[item.part];
    const int32_t* pages = batch.pages + batch.table_starts[item.entry];
    const int64_t* order = batch.order + item.order;
    // Rows in scratch: by KV head, token, head of the group.
    const int64_t group = batch.heads / batch.kv_heads, rows = item.rows * group, columns = room.columns;
    const int64_t height = products.begin(rows), all_rows = item.heads * height;
    const T* q = (const T*)(item.part ? call.q_sink : call.q);
    const int64_t q_row = item.part ? call.q_sink_row : call.q_row, q_head = item.part ? call.q_sink_head : call.q_head;
    const auto each = [&](const auto& act) {
        for (int64_t h = 0; h < item.heads; h++)
            for (int64_t i = 0, r = h * height; i < item.rows; i++)
                for (int64_t g = 0; g < group; g++, r++) act(r, order[i], (item.head + h) * group + g);
    };
    // V that is a view of K is fetched with it.
    const bool is_view = call.v == call.k && call.v_slot == call.k_slot && call.v_head == call.k_head;
    if (item.split < item.stop && fetched != index) {
        const Places places = first_places(batch, item);
        fetch_block(places, (const char*)((const T*)call.k + item.head * call.k_head), call.k_slot * sizeof(T), call.k_head * sizeof(T),
                    batch.key_size * sizeof(T), item.heads);
        if (!is_view)
            fetch_block(places, (const char*)((const T*)call.v + item.head * call.v_head), call.v_slot * sizeof(T), call.v_head * sizeof(T),
                    batch.value_size * sizeof(T), item.heads);
    }
    each([&](int64_t r, int64_t row, int64_t head) { products.put_query(r, q + row * q_row + head * q_head); });
    products.end_queries(all_rows);
    const float cap = (float)call.softcap, scale = (float)(cap != 0.0f ? call.scale / call.softcap : call.scale * 1.4426950408889634);
    bool merged = false;
    const auto keep_states = [&](int64_t split) {
        // One split's, or those of all splits of an item that leads.
        each([&](int64_t r, int64_t row, int64_t head) {
            float* const sums = (merged ? room.merged : products.sums) + r * columns;
            const Tail tail = merged ? room.tails[r] : products.tail(r);
            if (batch.base[row] < 0) {
                products.put_in_order(sums);
                finish<T>(call, row, head, sums, tail, room.spare);
            } else {
                float* state = call.states + ((batch.shift[item.part][row] + split) * batch.heads + head) * call.state_size;
                std::memcpy(state, sums, 4 * columns);
                store(state + columns, tail);
            }
        });
    };
    // Rows of all heads are one piece of memory, which is best fetched from first to last.
    const bool slabs = item.heads > 1 && item.heads == batch.kv_heads;
    const int64_t k_slabs = slabs && call.k_head == batch.key_size && call.k_slot == item.heads * call.k_head ? item.heads : 0;
    const int64_t v_slabs = slabs && call.v_head == batch.value_size && call.v_slot == item.heads * call.v_head ? item.heads : 0;
    if (item.split == item.stop) products.clear(all_rows);
    uint64_t ahead = 0;
    int64_t ahead_block = -1;
    Places places, next, none;
    for (int64_t& slot : none.slots) slot = -1;
    for (int64_t split = item.split; split < item.stop; split++) {
        const int64_t end = item.last < split_start(split + 1) ? item.last : split_start(split + 1);
        products.clear(all_rows);
        for (int64_t block = (item.first > split_start(split) ? item.first : split_start(split)) / BLOCK * BLOCK; block < end;
             block += BLOCK) {
            uint64_t any = 0;
            for (int64_t i = 0; i < item.rows; i++) any |= room.seen[i] = sight(part, order[i], block);
            if (!any) continue;
            // Rows that see nothing at the edges, as the first ones under a diagonal do, have no part in it.
            int64_t from = 0, to = item.rows;
            while (!room.seen[from]) from++;
            while (!room.seen[to - 1]) to--;
            places = any == ahead && block == ahead_block ? next : places_of(batch, pages, block, any);
            // What comes next is likely as visible.
            ahead_block = block + BLOCK;
            ahead = likely(item, ahead_block);
            next = places_of(batch, pages, ahead_block, ahead);
            if (!ahead) {
                // Likely the next item of this thread.
                const int64_t other = __atomic_load_n(&call.next_item, __ATOMIC_RELAXED);
                if (other < batch.num_items && batch.items[other].head == item.head && batch.items[other].heads == item.heads)
                    next = first_places(batch, batch.items[other]), fetched = other;
            }
            for (int64_t h = 0; h < item.heads; h++) {
                Rows keys[BLOCK / GROUP], values[BLOCK / GROUP];
                const int64_t head = item.head + h;
                find_rows(batch, pages, block, any, places, next, (const char*)((const T*)call.k + head * call.k_head),
                          call.k_slot * sizeof(T), batch.key_size * sizeof(T), h, k_slabs, room.zeros, room.k_copies, keys);
                find_rows(batch, pages, block, any, places, is_view ? none : next, (const char*)((const T*)call.v + head * call.v_head),
                          call.v_slot * sizeof(T), batch.value_size * sizeof(T), h, v_slabs, room.zeros, room.v_copies, values);
                products.add_block(h * height, from * group, (to - from) * group, keys, values, scale, cap);
            }
        }
        if (!item.leads) {
            keep_states(split);
        } else if (item.stop - item.split > 1) {
            for (int64_t r = 0; r < all_rows; r++) {
                const Tail tail = products.tail(r);
                if (merged)
                    merge(room.merged + r * columns, room.tails[r], products.sums + r * columns, tail, columns);
                else
                    room.tails[r] = tail;
            }
            if (!merged) std::memcpy(room.merged, products.sums, 4 * all_rows * columns);
            merged = true;
        }
    }
    if (item.leads) keep_states(item.split);
    // Whoever ends last merges.
    for (int64_t i = 0; i < item.rows; i++)
        for (int64_t h = item.head; h < item.head + item.heads; h++) {
            const int64_t row = order[i];
            int32_t* left = call.left + row * batch.kv_heads + h;
            if (batch.base[row] < 0 || __atomic_fetch_sub(left, 1, __ATOMIC_ACQ_REL) != 1) continue;
            *left = (int32_t)batch.pieces[row];
            for (int64_t head = h * group; head < (h + 1) * group; head++) {
                float* state = call.states + (batch.base[row] * batch.heads + head) * call.state_size;
                Tail tail = loaded<Tail>(state + columns);
                for (int64_t s = batch.skip[row]; s < batch.count[row]; s++) {
                    const float* other = state + s * batch.heads * call.state_size;
                    merge(state, tail, other, loaded<Tail>(other + columns), columns);
                }
                products.put_in_order(state);
                finish<T>(call, row, head, state, tail, room.spare);
            }
        }
}

template <class Products>
void attend(void* data) {
    Call& call = *(Call*)data;
    const int64_t number = __atomic_fetch_add(&call.next_room, 1, __ATOMIC_RELAXED);
    if (number >= call.batch->threads) return;
    Products products(*call.batch, call.room + number * call.room_size);
    int64_t fetched = -1;
    for (int64_t i; (i = __atomic_fetch_add(&call.next_item, 1, __ATOMIC_RELAXED)) < call.batch->num_items;) {
        run_item(call, i, fetched, products);
        __atomic_fetch_add(&call.done, 1, __ATOMIC_RELEASE);
    }
}

}  // namespace
