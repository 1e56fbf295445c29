// The entries of linear_pack.h.
#include "linear_pack.h"

extern "C" int quire_rows_now;

namespace {

const PackKernels& kernels() {
    const int level = quire_rows_now;
    return level == 2 ? quire_pack_avx512 : level == 1 ? quire_pack_avx2 : quire_pack_portable;
}

}  // namespace

extern "C" {

// ``group``: a multiple of 8 that divides the inputs, up to 128; of the other forms 0.
void quire_pack_linear(const void* weight, int64_t is_bfloat16, int64_t stride, int64_t outputs, int64_t inputs, int64_t form, int64_t group,
                       void* to, bfloat16* scales, int64_t threads, Parallel parallel) {
    PackCall call = {weight, stride, inputs, outputs, group, form, (uint8_t*)to, scales, {0}};
    run_on(threads, is_bfloat16 ? kernels().pack_bfloats : kernels().pack_floats, &call, parallel);
}

// Whether bfloat16 has all these numbers exactly.
int quire_fits_bfloat16(const float* from, int64_t count) { return kernels().only_upper_halves(from, count); }
}
