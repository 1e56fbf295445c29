// Low-rank products of a ragged batch on a CPU: what a call is. The work is in low_rank_body.h, one file for each kind of processors.

#pragma once

#include "common.h"

// -- what Python hands in (quire/kernels/linear/low_rank.py has the same structures) -------------------------------------------

extern "C" {

struct Piece {
    const void* a;    // [S, I]
    const void* b;    // [S, O]
    int64_t column;   // of y, the first
    int64_t outputs;  // O
};

struct Work {
    const int64_t* blocks;  // [num_blocks, 4]: the first of its rows in ``rows``, how many (1..MOST_ROWS), first rank row, rank
    const int64_t* rows;    // of x and y
    const Piece* pieces;
    float* room;  // [threads, room_of_one]: MOST_ROWS * (inputs + the largest rank + the largest outputs) each
    int64_t num_blocks, num_pieces, inputs, largest_rank, room_of_one, bfloat16;
};

}

namespace {

constexpr int MOST_ROWS = 4;

struct Call {
    const Work* work;
    void* y;
    int64_t y_stride;
    const void* x;
    int64_t x_stride;
    // Right for any number of threads, also for fewer than were asked for.
    std::atomic<int64_t> next_block, next_room;
};

typedef void (*RunCall)(void*);

}  // namespace

// For float32 and bfloat16; null where this compiler does not make them.
extern const RunCall quire_low_rank_portable[2], quire_low_rank_avx2[2], quire_low_rank_avx512[2];
