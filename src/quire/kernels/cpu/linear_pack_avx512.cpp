// Packing of weights with AVX-512: see linear_pack_body.h.
#include "linear_pack.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
#pragma GCC target("arch=x86-64-v4")
#include "linear_pack_body.h"

const PackKernels quire_pack_avx512 = {pack_panels<float>, pack_panels<bfloat16>, only_upper_halves};
#else
const PackKernels quire_pack_avx512 = {};
#endif
