// Packing of weights with vectors that any processor has: see linear_pack_body.h.
#define REGISTER 16
#include "linear_pack.h"

#include "linear_pack_body.h"

const PackKernels quire_pack_portable = {pack_panels<float>, pack_panels<bfloat16>, only_upper_halves};
