// SPDX-License-Identifier: Apache-2.0
// Structs that describe themselves: a field is written once, and on the host visit_fields() lists it.
//
//   struct Pair {
//     FIELDS_OF(Pair);
//     FIELD(uint32_t, first);
//     FIELD_ARRAY(int32_t, rest, 4);
//   };
#pragma once

#include "region/platform.h"

#if defined(__CUDACC_RTC__)
#define FIELDS_OF(S) using Self = S
#define FIELD(type, name) type name
#define FIELD_ARRAY(type, name, count) type name[count]
#define STATE_ARRAY(type, name, count) type* name
#define STATE_ARRAYS(type, name) type name
#else
#include <string>
#define FIELDS_OF(S)                             \
  using Self = S;                                \
  static constexpr const char* struct_name = #S; \
  static constexpr uint32_t first_field = __COUNTER__ + 1
#define FIELD(type, name) \
  type name;              \
  DESCRIBE_FIELD(name)
#define FIELD_ARRAY(type, name, count) \
  type name[count];                    \
  DESCRIBE_FIELD(name)
// The address of an array of `count` elements; the geometry `g` may be used in it.
#define STATE_ARRAY(type, name, count)                                                             \
  FIELD(type*, name)                                                                               \
  template <class G, class Visit>                                                                  \
  static void visit_array(blink::FieldIndex<name##_field>, Self& self, const G& g, Visit& visit) { \
    (void)g;                                                                                       \
    visit(#name, self.name, uint64_t(count));                                                      \
  }
// A struct of such arrays: theirs are called by its name, a dot and their own.
#define STATE_ARRAYS(type, name)                                                                   \
  FIELD(type, name);                                                                               \
  template <class G, class Visit>                                                                  \
  static void visit_array(blink::FieldIndex<name##_field>, Self& self, const G& g, Visit& visit) { \
    auto visit_inner = [&](const char* inner, auto*& pointer, uint64_t count) {                    \
      visit((std::string(#name ".") + inner).c_str(), pointer, count);                             \
    };                                                                                             \
    blink::visit_arrays(self.name, g, visit_inner);                                                \
  }
#define DESCRIBE_FIELD(name)                                                 \
  static constexpr uint32_t name##_field = __COUNTER__ - first_field;        \
  template <class Visit>                                                     \
  static void visit_field(blink::FieldIndex<name##_field>, Visit& visit) {   \
    visit.template field<decltype(Self::name)>(#name, offsetof(Self, name)); \
  }

namespace blink {

template <uint32_t N>
struct FieldIndex {};

// Call visit.field<type>(name, offset) for every field of S, in order.
template <class S, class Visit, uint32_t N = 0>
void visit_fields(Visit& visit) {
  if constexpr (requires { S::visit_field(FieldIndex<N>{}, visit); }) {
    S::visit_field(FieldIndex<N>{}, visit);
    visit_fields<S, Visit, N + 1>(visit);
  }
}

// Call visit(name, pointer, count) for every STATE_ARRAY of S and of its STATE_ARRAYS, in order.
template <class S, class G, class Visit, uint32_t N = 0>
void visit_arrays(S& self, const G& g, Visit& visit) {
  if constexpr (requires { S::visit_array(FieldIndex<N>{}, self, g, visit); })
    S::visit_array(FieldIndex<N>{}, self, g, visit);
  if constexpr (requires { S::visit_field(FieldIndex<N>{}, visit); }) visit_arrays<S, G, Visit, N + 1>(self, g, visit);
}

}  // namespace blink
#endif
