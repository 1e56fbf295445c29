// The entry of recurrence.h.
#include "recurrence.h"

#include <new>

#include "linear.h"

extern "C" int quire_rows_now;

namespace {

constexpr int64_t MEMORY = 4 << 20;  // bytes of a piece, which stay in a cache

}  // namespace

extern "C" Mix quire_begin_mix(const Mixer* mixer) {
    const int level = quire_rows_now;
    return (level == 2 ? quire_mix_avx512 : level == 1 ? quire_mix_avx2 : quire_mix_portable)[mixer->types];
}

// Run a mixer over all rows. ``x``, ``rates``: rows so many elements apart; of SSD the rates are a part of x. ``out``: contiguous rows
// of H * V numbers, or of C. Return 1, with nothing written, if there is no memory.
extern "C" int quire_mix(const Mixer* mixer, const Forward* forward, void* out, const void* x, int64_t stride, const void* rates,
                         int64_t rates_stride, void* kept, float* states, int64_t threads) {
    if (!forward->rows) return 0;
    static thread_local Room room;
    Task task = {mixer, forward, out, x, rates, stride, rates_stride, kept, states, forward->rows, nullptr, nullptr, nullptr, nullptr};
    int64_t phases = 1;
    if (mixer->kind != CONVOLUTION) {
        const int64_t numbers = mixed_floats(*mixer);
        int64_t piece = MEMORY / (4 * numbers);
        piece = piece < 16 ? 16 : piece > ROWS_AT_MOST ? ROWS_AT_MOST : piece;
        task.piece = piece = piece < forward->rows ? piece : forward->rows;
        float* place = room.of(piece * numbers);
        if (!place) return 1;
        take_room(task, place);
        phases = 3 * ((forward->rows + piece - 1) / piece);
    }
    task.phases = new (std::nothrow) Phase[phases];
    if (!task.phases) return 1;
    run_on(threads, quire_begin_mix(mixer), &task, mixer->parallel);
    delete[] task.phases;
    return 0;
}
