// A shared object that, preloaded, lets a process see a CPU that ends at AVX2: no AVX-512, no AMX, no VNNI.
//
// Linux on Intel can make the instruction CPUID fault (arch_prctl(ARCH_SET_CPUID)); the handler runs it in the process's place
// and clears the bits. Children inherit the setting, and this object through LD_PRELOAD. Programs' own handlers of SIGSEGV are
// not installed, for they would get these faults. Instructions are not trapped: it limits programs that ask before they use.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#define ARCH_SET_CPUID 0x1012
#define BIT(n) (UINT32_C(1) << (n))

typedef int (*sigaction_fn)(int, const struct sigaction*, struct sigaction*);

static long let_cpuid_fault(int fault) { return syscall(SYS_arch_prctl, ARCH_SET_CPUID, !fault); }

static int real_sigaction(int number, const struct sigaction* action, struct sigaction* before) {
  return ((sigaction_fn)dlsym(RTLD_NEXT, "sigaction"))(number, action, before);
}

struct registers {
  uint32_t a, b, c, d;
};

// Intel's manual, volume 2, CPUID: which bits say what.
static void hide(uint32_t leaf, uint32_t subleaf, struct registers* r) {
  if (leaf == 7 && subleaf == 0) {
    r->b &= ~(BIT(16) | BIT(17) | BIT(21) | BIT(26) | BIT(27) | BIT(28) | BIT(30) | BIT(31));  // AVX-512 F to VL
    // AVX-512 VBMI, VBMI2, VNNI, BITALG, VPOPCNTDQ; GFNI, VAES, VPCLMULQDQ
    r->c &= ~(BIT(1) | BIT(6) | BIT(11) | BIT(12) | BIT(14) | BIT(8) | BIT(9) | BIT(10));
    r->d &= ~(BIT(2) | BIT(3) | BIT(8) | BIT(23) | BIT(22) | BIT(24) | BIT(25));  // AVX-512 4VNNIW to FP16; AMX
  } else if (leaf == 7 && subleaf == 1) {
    r->a &= ~(BIT(4) | BIT(5) | BIT(21) | BIT(23));           // AVX-VNNI, AVX-512 BF16, AMX FP16, AVX-IFMA
    r->d &= ~(BIT(4) | BIT(5) | BIT(8) | BIT(10) | BIT(19));  // AVX-VNNI-INT8, AVX-NE-CONVERT, AMX COMPLEX, AVX10
  } else if (leaf == 0x1d || leaf == 0x1e || leaf == 0x24) {  // tiles, their products, AVX10
    memset(r, 0, sizeof *r);
  }
}

static void on_fault(int number, siginfo_t* info, void* context) {
  greg_t* saved = ((ucontext_t*)context)->uc_mcontext.gregs;
  const unsigned char* code = (const unsigned char*)saved[REG_RIP];
  if (info->si_code != SI_KERNEL || code[0] != 0x0f || code[1] != 0xa2) {  // not CPUID: die of it, as without this object
    const struct sigaction original = {.sa_handler = SIG_DFL};
    real_sigaction(number, &original, NULL);
    return;
  }
  const uint32_t leaf = (uint32_t)saved[REG_RAX], subleaf = (uint32_t)saved[REG_RCX];
  struct registers r = {leaf, 0, subleaf, 0};
  let_cpuid_fault(0);
  __asm__ volatile("cpuid" : "+a"(r.a), "=b"(r.b), "+c"(r.c), "=d"(r.d));
  let_cpuid_fault(1);
  hide(leaf, subleaf, &r);
  saved[REG_RAX] = r.a;
  saved[REG_RBX] = r.b;
  saved[REG_RCX] = r.c;
  saved[REG_RDX] = r.d;
  saved[REG_RIP] += 2;
}

int sigaction(int number, const struct sigaction* action, struct sigaction* before) {
  if (number != SIGSEGV || action == NULL) return real_sigaction(number, action, before);
  if (before != NULL) memset(before, 0, sizeof *before);
  return 0;
}

sighandler_t signal(int number, sighandler_t handler) {
  if (number == SIGSEGV) return SIG_DFL;
  const struct sigaction action = {.sa_handler = handler, .sa_flags = SA_RESTART};
  struct sigaction before;
  return real_sigaction(number, &action, &before) == 0 ? before.sa_handler : SIG_ERR;
}

__attribute__((constructor)) static void begin(void) {
  const struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_NODEFER};
  if (real_sigaction(SIGSEGV, &action, NULL) == 0 && let_cpuid_fault(1) == 0) return;
  static const char message[] = "avx2_only: this system cannot let CPUID fault\n";
  (void)!write(STDERR_FILENO, message, sizeof message - 1);
  _exit(1);
}
