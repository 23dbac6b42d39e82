// The tables, one per instruction set. Only ops.cpp chooses between them.
#pragma once

#include "ops.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define KAKEYA_X86 1
#else
#define KAKEYA_X86 0
#endif

#if defined(__aarch64__) && defined(__GNUC__)
#define KAKEYA_ARM64 1
#else
#define KAKEYA_ARM64 0
#endif

namespace kakeya {

#if KAKEYA_X86
extern const Ops kAvx512Ops;
extern const Ops kAvx2Ops;
#endif
#if KAKEYA_ARM64
extern const Ops kNeonOps;
#endif
extern const Ops kGenericOps;

}  // namespace kakeya
