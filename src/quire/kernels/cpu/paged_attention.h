// Attention over pages on a CPU: what the planner, the kernels of each machine and Python (quire/kernels/attention/cpu_attention.py) share.
//
// Letters: T rows (new tokens) of the batch; B entries; P page size; Hq, Hkv query and KV heads; G = Hq / Hkv; Dk, Dv head sizes.
//
// An item of work is some rows under some KV heads, with all query heads of these, over a range of keys: splits, which begin at fixed
// addresses. Within a split the keys come in blocks of BLOCK, also at fixed addresses; the running maximum and the sums go from
// block to block. Splits merge in order. A key that a row does not see adds an exact 0, so a row's result is the same to the bit
// whatever rows it shares an item with, and however splits are shared out.

#pragma once

#include "common.h"

namespace {

constexpr int64_t BLOCK = 64;         // keys
constexpr int64_t FIRST_SPLIT = 512;  // keys

// The address at which a split begins: 32 of 512 keys, then 16 of twice as many each time, so that few are merged at any length.
INLINE int64_t split_start(int64_t split) {
    if (split < 32) return split * FIRST_SPLIT;
    int64_t octave = (split - 32) / 16;
    return (32 * FIRST_SPLIT << octave) + (split - 32) % 16 * (2 * FIRST_SPLIT << octave);
}

INLINE int64_t split_of(int64_t address) {
    int64_t split = address / FIRST_SPLIT;
    for (int64_t octave = 0; split >= 32; octave++) {
        int64_t next = 32 * FIRST_SPLIT << (octave + 1);
        if (address < next) return 32 + 16 * octave + (address - next / 2) / (2 * FIRST_SPLIT << octave);
    }
    return split;
}

struct Item {
    int64_t part;              // 0: window, 1: sink
    int64_t entry;             // whose page table is read
    int64_t order, rows;       // the rows: order[order..order + rows - 1]
    int64_t head, heads;       // KV heads
    int64_t split, stop;       // splits
    int64_t first, last;       // keys: visible ones lie in first..last - 1
    int64_t leads;             // begins with the first split of its rows: merges its splits by itself
};

// Visible keys of one part of the plan. A row sees low <= address < high, and the bits that are set for it.
struct Part {
    const int64_t *low, *high;   // [T]
    const int64_t *first, *stop;  // [B]: hull of all that the entry's rows see
    // [T, 3], or null: where the row's words in ``bits`` begin, how many there are, the address of bit 0 (a multiple of BLOCK).
    const int64_t* columns;
    const uint64_t* bits;
};

// The batch, and what the planner made of it.
struct Batch {
    Part parts[2];
    const int64_t* starts;        // [B + 1]
    const int64_t* table_starts;  // [B + 1]: of the entries in ``pages``
    const int32_t* pages;
    // Made, [T] each: rows in the order of items; the first of a row's states, or -1: its one item writes the result; how many; how
    // many of these the first one stands for; items under a KV head; by part, what to add to a split for the number of its state.
    int64_t *order, *base, *count, *skip, *pieces, *shift[2];
    Item* items;  // [capacity]
    int64_t num_parts, entries, rows, page_size, heads, kv_heads, key_size, value_size;
    int64_t one_thread, capacity;  // ``one_thread``: products that one thread ends before a second one begins
    int64_t num_items, num_states, most_rows, threads;  // made; ``most_rows``: of an item, under all its heads, in whole tiles
};

// One layer's attention. Strides are in elements.
struct Call {
    const Batch* batch;
    float* states;  // [num_states, Hq, state_size]
    int32_t* left;  // [T, Hkv]: items that have not ended; whoever ends last counts them anew
    char* room;
    int64_t state_size, room_size;  // floats; bytes of a thread
    int64_t q_row, q_head, q_sink_row, q_sink_head, k_slot, k_head, v_slot, v_head;
    int64_t type, level;
    const void *q, *q_sink, *k, *v;
    void* out;           // [T, Hq, Dv]
    float* lse;          // [T, Hq], or null
    const float* sinks;  // [Hq] learned logits, or null
    double scale, softcap;  // softcap 0: none
    int64_t next_item, next_room, done;  // items; threads; items that have ended
};

// Query rows of a head that tiles multiply at once (paged_attention_tiles.h): fewer if there are few, unless Dk is no multiple of 32.
INLINE int64_t tile_rows(int64_t rows, int64_t key_size) { return rows > 8 || key_size % 32 ? 16 : rows > 4 ? 8 : 4; }
INLINE int64_t whole_tiles(int64_t rows, int64_t key_size) {
    const int64_t of_tile = tile_rows(rows, key_size);
    return (rows + of_tile - 1) / of_tile * of_tile;
}

// Bytes of scratch of a thread: as much as the kernel of any machine needs (``rooms``).
INLINE int64_t room_for(int64_t rows, int64_t key_size, int64_t value_size) {
    const int64_t columns = (value_size + 15) / 16 * 16, longer = key_size > columns ? key_size : columns;
    const int64_t bytes = 4 * BLOCK * (2 * key_size + 8 + 2 * columns) + rows * (4 * key_size + 4 * BLOCK + 8 * columns + 148) + 4 * longer + 64;
    constexpr int64_t OF_TILES = 4 * 16 * (BLOCK + 1);
    return (bytes + 63) / 64 * 64 + OF_TILES + 64 * 24;
}

}  // namespace

// The body of a parallel region for one machine, by type (float32, bfloat16, float16); ``call``: a Call. Null: not in this build,
// or as at the level before.
typedef void (*Attend)(void* call);
// Make the items of a batch. Return how many there are, of which as many as ``capacity`` are written; -1: no memory.
extern "C" int64_t quire_attention_plan(Batch* batch, int64_t threads);
// Bytes of a thread for a planned batch.
extern "C" int64_t quire_attention_room(const Batch* batch);
// Begin a layer's call; the arguments are those of Call that differ from layer to layer. Any number of threads runs what it returns,
// until ``done`` is the number of items.
extern "C" Attend quire_begin_attention(Call* call, const Call* planned, const void* q, const void* q_sink, const void* k, const void* v,
                                        void* out, float* lse, const float* sinks, double scale, double softcap);
extern const Attend quire_attend_portable[3], quire_attend_avx2[3], quire_attend_avx512[3], quire_attend_bfloat16[3],
    quire_attend_amx[3], quire_attend_emulated[3];
