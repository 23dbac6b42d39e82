// The kernels for AArch64 processors with the dot product instructions.
#include "ops_tables.h"

#if KAKEYA_ARM64

// From here to the end this file is compiled for them; ops.cpp asks the processor before it comes here.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif

#include <arm_neon.h>

#include "lanes_common.h"

namespace kakeya {
namespace neon {
#include "lanes_neon.h"
#include "unpack_kernel.h"
#include "rounding_kernel.h"
#include "product_kernel.h"
#include "rowwise_kernel.h"
#include "attention_kernel.h"
#include "choice_lanes_generic.h"
#include "choice_kernel.h"
}  // namespace neon

extern const Ops kNeonOps = {"neon-dotprod",
                             neon::round_groups,
                             neon::round_super,
                             neon::product,
                             neon::rms_norm_row,
                             neon::gated_row,
                             neon::store_kv,
                             neon::attend,
                             neon::choice_ops};

}  // namespace kakeya

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif  // KAKEYA_ARM64
