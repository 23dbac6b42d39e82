// The kernels for processors with AVX2, FMA and F16C.
#include "ops_tables.h"

#if KAKEYA_X86

#include <immintrin.h>

#include <type_traits>

#include "lanes_common.h"

// From here to the end this file is compiled for AVX2; ops.cpp asks the processor before it comes here.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

namespace kakeya {
namespace avx2 {
#include "lanes_avx2.h"
#include "unpack_kernel.h"
#include "rounding_kernel.h"
#include "product_kernel.h"
#include "rowwise_kernel.h"
#include "attention_kernel.h"
#include "choice_lanes_avx2.h"
#include "choice_kernel.h"
}  // namespace avx2

extern const Ops kAvx2Ops = {"avx2",
                             avx2::round_groups,
                             avx2::round_super,
                             avx2::product,
                             avx2::rms_norm_row,
                             avx2::gated_row,
                             avx2::store_kv,
                             avx2::attend,
                             avx2::choice_ops};

}  // namespace kakeya

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif  // KAKEYA_X86
