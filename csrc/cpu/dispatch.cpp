// Chooses one instruction set's kernel table, once.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "features.h"
#include "kernel_table.h"

namespace pyengine::cpu {

namespace scalar {
extern const KernelTable kKernelTable;
}
#if defined(PE_HAVE_X86_ISAS)
namespace avx2 {
extern const KernelTable kKernelTable;
}
namespace avx512 {
extern const KernelTable kKernelTable;
}
namespace avx512_vnni {
#define PE_DECLARE(name, Params) const char* name(const Params& params);
PE_CPU_VNNI_KERNELS(PE_DECLARE)
#undef PE_DECLARE
}  // namespace avx512_vnni
#if defined(PE_HAVE_AMX)
namespace amx {
#define PE_DECLARE(name, Params) const char* name(const Params& params);
PE_CPU_AMX_KERNELS(PE_DECLARE)
#undef PE_DECLARE
}  // namespace amx
#endif
#endif

namespace {

struct IsaList {
  IsaEntry entries[kMaxIsas];
  int size;
};

#if defined(PE_HAVE_X86_ISAS)
const KernelTable& vnni_table() {
  static const KernelTable table = [] {
    KernelTable t = avx512::kKernelTable;
#define PE_REPLACE(name, Params) t.name = &avx512_vnni::name;
    PE_CPU_VNNI_KERNELS(PE_REPLACE)
#undef PE_REPLACE
    return t;
  }();
  return table;
}

#if defined(PE_HAVE_AMX)
const KernelTable& amx_table() {
  static const KernelTable table = [] {
    KernelTable t = vnni_table();
#define PE_REPLACE(name, Params) t.name = &amx::name;
    PE_CPU_AMX_KERNELS(PE_REPLACE)
#undef PE_REPLACE
    return t;
  }();
  return table;
}
#endif
#endif

const IsaList& isa_list() {
  static const IsaList list = [] {
    IsaList l{};
    l.entries[l.size++] = {"scalar", &scalar::kKernelTable, true};
#if defined(PE_HAVE_X86_ISAS)
#if defined(PE_SIMDE)
    const bool emulated = true;  // these kernels run anywhere
#else
    const bool emulated = false;
#endif
    l.entries[l.size++] = {"avx2", &avx2::kKernelTable, emulated || features().avx2};
    l.entries[l.size++] = {"avx512", &avx512::kKernelTable, emulated || features().avx512};
    l.entries[l.size++] = {"avx512_vnni", &vnni_table(), emulated || features().avx512_vnni};
#if defined(PE_HAVE_AMX)
    // Every kernel of its table must run: those of avx512_vnni too.
    l.entries[l.size++] = {"amx", &amx_table(), features().avx512_vnni && features().amx_int8 && features().amx_bf16};
#endif
#endif
    return l;
  }();
  return list;
}

const IsaEntry& find_isa(const char* name) {
  const IsaList& list = isa_list();
  std::string known;
  for (int i = 0; i < list.size; i++) {
    const IsaEntry& entry = list.entries[i];
    if (strcmp(entry.name, name) == 0) {
      if (!entry.supported)
        throw std::invalid_argument(std::string("this machine does not support instruction set '") + name + "'");
      return entry;
    }
    known += std::string(known.empty() ? "" : ", ") + entry.name;
  }
  throw std::invalid_argument(std::string("unknown instruction set '") + name + "' (this build has " + known + ")");
}

const IsaEntry& initial_isa() {
  const char* forced = std::getenv("PYENGINE_CPU_ISA");
  if (forced != nullptr && *forced != '\0') return find_isa(forced);
  const IsaList& list = isa_list();
  int widest = 0;
  for (int i = 0; i < list.size; i++) {
    if (list.entries[i].supported) widest = i;
  }
  return list.entries[widest];
}

std::atomic<const IsaEntry*> forced_isa{nullptr};

const IsaEntry& active_isa() {
  static const IsaEntry& initial = initial_isa();
  const IsaEntry* forced = forced_isa.load(std::memory_order_acquire);
  return forced != nullptr ? *forced : initial;
}

}  // namespace

int isa_entries(const IsaEntry** entries) {
  *entries = isa_list().entries;
  return isa_list().size;
}

const KernelTable& kernels() { return *active_isa().table; }

const char* current_isa() { return active_isa().name; }

void set_isa(const char* name) { forced_isa.store(&find_isa(name), std::memory_order_release); }

}  // namespace pyengine::cpu
