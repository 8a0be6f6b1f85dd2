// One instruction set's table; compiled once per instruction set, with PE_ISA set to its name.
#include "kernel_table.h"

namespace pyengine::cpu {
namespace PE_ISA {

#define PE_DECLARE(name, Params) const char* name(const Params& params);
PE_CPU_KERNELS(PE_DECLARE)
#undef PE_DECLARE

extern const KernelTable kKernelTable;
const KernelTable kKernelTable = {
#define PE_ENTRY(name, Params) &name,
    PE_CPU_KERNELS(PE_ENTRY)
#undef PE_ENTRY
};

}  // namespace PE_ISA
}  // namespace pyengine::cpu
