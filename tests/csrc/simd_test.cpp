// Checks of csrc/cpu/simd.h for the instruction set that it is compiled for; built and run by tests/kernels/test_simd.py.
// Exits with 1 and a line on stderr at the first failure.
#include "../../csrc/cpu/simd.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <limits>

namespace {

using namespace pyengine;
using namespace pyengine::cpu::PE_ISA;

#define CHECK(condition, ...)                                                          \
  do {                                                                                 \
    if (!(condition)) {                                                                \
      fprintf(stderr, "%s:%d: %s does not hold for ", __FILE__, __LINE__, #condition); \
      fprintf(stderr, __VA_ARGS__);                                                    \
      fprintf(stderr, "\n");                                                           \
      exit(1);                                                                         \
    }                                                                                  \
  } while (false)

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

bool same(float a, float b) { return std::isnan(a) ? std::isnan(b) : float_bits(a) == float_bits(b); }

// What the bits of a small float mean, from the definition.
float decode(uint32_t bits, int exponent_bits, int mantissa_bits, bool has_infinity) {
  const uint32_t mantissa = bits & ((1u << mantissa_bits) - 1);
  const uint32_t exponent = bits >> mantissa_bits & ((1u << exponent_bits) - 1);
  const float sign = bits >> (exponent_bits + mantissa_bits) & 1 ? -1.0f : 1.0f;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const bool top = exponent == (1u << exponent_bits) - 1;
  if (top && has_infinity) return mantissa == 0 ? sign * kInfinity : kNaN;
  if (top && mantissa == (1u << mantissa_bits) - 1) return kNaN;
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), 1 - bias - mantissa_bits);
  return sign *
         std::ldexp(static_cast<float>(mantissa + (1u << mantissa_bits)), static_cast<int>(exponent) - bias - mantissa_bits);
}

// Every bit pattern: scalar and vector conversion to float agree with the definition, and what can come back does.
template <class T>
void small_float(uint32_t patterns, int exponent_bits, int mantissa_bits, bool has_infinity, bool saturates) {
  for (uint32_t bits = 0; bits < patterns; bits++) {
    T in[kLanes], out;
    for (T& x : in) x = T{static_cast<decltype(T::bits)>(bits)};
    float lanes[kLanes];
    store(lanes, load(in));
    const float expected = decode(bits, exponent_bits, mantissa_bits, has_infinity);
    CHECK(same(expected, to_float(in[0])), "pattern %x", bits);
    for (const float x : lanes) CHECK(same(expected, x), "pattern %x", bits);
    from_float(expected, &out);
    if (std::isnan(expected)) {
      CHECK(std::isnan(to_float(out)), "pattern %x", bits);
    } else if (!std::isinf(expected) || !saturates) {
      CHECK(out.bits == bits, "pattern %x, got %x", bits, out.bits);
    } else {
      CHECK(std::isfinite(to_float(out)) && std::signbit(to_float(out)) == std::signbit(expected), "pattern %x", bits);
    }
  }
}

// Between two neighbours: the nearer one, the even one half way; the scalar and, where there is one, the vector store.
template <class T, bool kVector>
void rounding(uint32_t last_finite) {
  for (uint32_t bits = 0; bits < last_finite; bits++) {
    const float low = to_float(T{static_cast<decltype(T::bits)>(bits)});
    const float high = to_float(T{static_cast<decltype(T::bits)>(bits + 1)});
    const float middle = low + (high - low) / 2;
    const uint32_t even = bits % 2 == 0 ? bits : bits + 1;
    const float inputs[] = {std::nextafter(middle, low), middle, std::nextafter(middle, high)};
    const uint32_t expected[] = {bits, even, bits + 1};
    for (int i = 0; i < 3; i++) {
      T out;
      from_float(inputs[i], &out);
      CHECK(out.bits == expected[i], "%a: got %x, expected %x", inputs[i], out.bits, expected[i]);
      if constexpr (kVector) {
        T lanes[kLanes];
        store(lanes, set1(inputs[i]));
        for (const T& x : lanes) CHECK(x.bits == expected[i], "%a: got %x, expected %x", inputs[i], x.bits, expected[i]);
      }
    }
  }
}

void saturation() {
  for (const float x : {449.0f, 464.0f, 1e30f, kInfinity}) {
    Float8E4M3 e4m3;
    from_float(-x, &e4m3);
    CHECK(to_float(e4m3) == -448.0f, "%a", x);
  }
  for (const float x : {57345.0f, 61440.0f, 1e30f, kInfinity}) {
    Float8E5M2 e5m2;
    from_float(x, &e5m2);
    CHECK(to_float(e5m2) == 57344.0f, "%a", x);
  }
  Float16 half;
  from_float(65520.0f, &half);  // half way beyond the largest: infinity
  CHECK(half.bits == 0x7c00, "65520");
}

void exponential() {
  double worst = 0;
  for (double x = -87.33; x < 88.37; x += 1e-3) {
    float lanes[kLanes];
    const float in = static_cast<float>(x);
    store(lanes, exp(set1(in)));
    if (in <= 0) {
      float other[kLanes];
      store(other, exp_nonpositive(set1(in)));
      CHECK(same(other[0], lanes[0]), "exp_nonpositive(%a) = %a", in, other[0]);
    }
    const double exact = std::exp(static_cast<double>(in));
    worst = std::fmax(worst, std::fabs(lanes[kLanes - 1] - exact) / exact);
  }
  CHECK(worst < 2e-7, "a relative error of %g", worst);
  const float inputs[] = {-87.4f, -1e30f, -kInfinity, 89.0f, kInfinity, kNaN};
  const float expected[] = {0, 0, 0, kInfinity, kInfinity, kNaN};
  for (int i = 0; i < 6; i++) {
    float lanes[kLanes];
    store(lanes, exp(set1(inputs[i])));
    for (const float y : lanes) CHECK(same(y, expected[i]), "exp(%a) = %a", inputs[i], y);
    if (inputs[i] > 0) continue;
    store(lanes, exp_nonpositive(set1(inputs[i])));
    for (const float y : lanes) CHECK(same(y, expected[i]), "exp_nonpositive(%a) = %a", inputs[i], y);
  }
}

void arithmetic() {
  float a[kLanes], b[kLanes], c[kLanes], out[kLanes];
  float sum = 0, largest = -kInfinity;
  for (int i = 0; i < kLanes; i++) {
    a[i] = static_cast<float>(i * 37 % 11) - 5;
    b[i] = static_cast<float>(i) + 1;
    c[i] = static_cast<float>(2 * i);
    sum += a[i];
    largest = std::fmax(largest, a[i]);
  }
  const VecF x = load(a), y = load(b), z = load(c);
#define CHECK_LANES(vector, scalar) \
  store(out, vector);               \
  for (int i = 0; i < kLanes; i++) CHECK(same(out[i], static_cast<float>(scalar)), "lane %d: %a", i, out[i])
  CHECK_LANES(x + y, a[i] + b[i]);
  CHECK_LANES(x - y, a[i] - b[i]);
  CHECK_LANES(x * y, a[i] * b[i]);
  CHECK_LANES(x / y, a[i] / b[i]);
  CHECK_LANES(fma(x, y, z), a[i] * b[i] + c[i]);  // small whole numbers: exact with and without fusing
  CHECK_LANES(fnma(x, y, z), c[i] - a[i] * b[i]);
  CHECK_LANES(min(x, y), std::fmin(a[i], b[i]));
  CHECK_LANES(max(x, y), std::fmax(a[i], b[i]));
  CHECK_LANES(abs(x), std::fabs(a[i]));
  CHECK_LANES(sqrt(y), std::sqrt(b[i]));
  CHECK_LANES(max(y, set1(kNaN)), kNaN);  // NaN in the second operand survives
  CHECK_LANES(min(y, set1(kNaN)), kNaN);
  CHECK_LANES(round_to_int(set1(2.5f)), 2.0f);
  CHECK_LANES(round_to_int(set1(-3.5f)), -4.0f);
  CHECK_LANES(mul_pow2(y, set1(-126.0f)), b[i] * 0x1p-126f);
  CHECK_LANES(mul_pow2(x, set1(3.0f)), a[i] * 8.0f);
  CHECK_LANES(mul_pow2(y, set1(128.0f)), kInfinity);
  CHECK(hsum(x) == sum, "%a", hsum(x));
  CHECK(hmax(x) == largest, "%a", hmax(x));
  CHECK(first_lane(x) == a[0], "%a", first_lane(x));
}

void partial() {
  for (int n = 0; n <= kLanes; n++) {
    float in[kLanes], lanes[kLanes], out[kLanes + 1];
    for (int i = 0; i < kLanes; i++) in[i] = static_cast<float>(i + 1);
    store(lanes, load_partial(in, n));
    for (int i = 0; i < kLanes; i++) CHECK(lanes[i] == (i < n ? in[i] : 0.0f), "lane %d of %d", i, n);
    for (float& x : out) x = -1;
    store_partial(out, load(in), n);
    for (int i = 0; i <= kLanes; i++) CHECK(out[i] == (i < n ? in[i] : -1.0f), "lane %d of %d", i, n);
  }
}

}  // namespace

int main() {
  small_float<Float16>(65536, 5, 10, true, false);
  small_float<BFloat16>(65536, 8, 7, true, false);
  small_float<Float8E4M3>(256, 4, 3, false, true);
  small_float<Float8E5M2>(256, 5, 2, true, true);
  for (int i = -128; i < 128; i++) {
    int8_t in[kLanes];
    float lanes[kLanes];
    for (int8_t& x : in) x = static_cast<int8_t>(i);
    store(lanes, load(in));
    for (const float x : lanes) CHECK(x == static_cast<float>(i), "%d", i);
  }
  rounding<Float16, true>(0x7bff);
  rounding<BFloat16, true>(0x7f7f);
  rounding<Float8E4M3, false>(0x7e);
  rounding<Float8E5M2, false>(0x7b);
  saturation();
  exponential();
  arithmetic();
  partial();
  return 0;
}
