// SPDX-License-Identifier: Apache-2.0
// The white space of a constrained text, as its JSON has had it so far: guesses have the same (grammar_drafts.h).
// Models differ in it, and a text seldom does. A wrong guess costs a row, and changes no result.
#pragma once

#include "automaton/walk.h"
#include "scheduler/sequence.h"

namespace blink {

BLINK_FN bool is_closing(uint32_t byte) { return byte == '}' || byte == ']'; }

BLINK_FN Gap gap_after(uint32_t byte) {
  return byte == ':' ? Gap::kColon : byte == ',' ? Gap::kComma : byte == '{' || byte == '[' ? Gap::kOpen : Gap::kNone;
}

BLINK_FN Spacing new_spacing() {
  Spacing spacing{};
  spacing.gap = uint8_t(Gap::kNone);
  for (uint8_t& run : spacing.runs) run = kUnknownRun;
  return spacing;
}

// Note the white space that stands in a gap.
BLINK_FN void learn_run(Spacing& s, Gap gap) {
  s.runs[uint32_t(gap)] = s.has_newline ? kNewlineRun : s.num_spaces;
  if (gap == Gap::kOpen && s.has_newline && s.num_spaces > s.indent) s.indent_step = s.num_spaces - s.indent;
}

// Go on by a byte of the text.
BLINK_FN void take_byte(Spacing& s, uint32_t byte) {
  if (s.in_string) {
    if (byte == '"' && !s.is_escaped) s.in_string = 0;
    s.is_escaped = byte == '\\' && !s.is_escaped;
    return;
  }
  if (byte == ' ') s.num_spaces = uint8_t(least(s.num_spaces + 1u, kMostSpaces));
  if (byte == '\n') s.has_newline = 1, s.num_spaces = 0;
  if (byte == ' ' || (byte >= '\t' && byte <= '\r')) return;
  const Gap before = Gap(s.gap);
  const Gap gap = !is_closing(byte) ? before : before == Gap::kOpen ? Gap::kNone : Gap::kClose;
  if (gap != Gap::kNone) learn_run(s, gap);
  if (s.has_newline) s.indent = s.num_spaces;
  s.gap = uint8_t(gap_after(byte));
  s.has_newline = s.num_spaces = 0;
  s.in_string = byte == '"';
}

// What white space a gap has. Of one that the text has not had yet: as the others.
BLINK_FN uint32_t expected_run(const Spacing& s, Gap gap) {
  const uint32_t run = s.runs[uint32_t(gap)], open = s.runs[uint32_t(Gap::kOpen)];
  if (run != kUnknownRun || gap == Gap::kColon || gap == Gap::kOpen) return run;
  if (gap == Gap::kClose || open == kNewlineRun) return open;
  return s.runs[uint32_t(Gap::kColon)] == 0 ? 0 : kUnknownRun;
}

// The next byte of a gap's white space; kNoGuess: it has no more, or nothing is known of it.
BLINK_FN uint32_t next_space(const Spacing& s, Gap gap, uint32_t run) {
  if (run == kUnknownRun) return kNoGuess;
  if (run != kNewlineRun) return !s.has_newline && s.num_spaces < run ? ' ' : kNoGuess;
  if (!s.has_newline) return '\n';
  const uint32_t indent = gap == Gap::kOpen    ? s.indent + s.indent_step
                          : gap == Gap::kClose ? s.indent - least(s.indent, s.indent_step)
                                               : s.indent;
  return s.num_spaces < indent ? ' ' : kNoGuess;
}

// What follows a colon or a comma without white space, if one kind of value alone can.
template <Items kItems>
BLINK_FN uint32_t guess_value(const Walk<kItems>& walk) {
  uint32_t found = kNoGuess, count = 0;
  for (const char byte : {'"', '{', '['})
    if (walk.may_take(uint8_t(byte))) found = uint8_t(byte), count++;
  return count == 1 ? found : kNoGuess;
}

// The byte that is guessed to come next behind a text of such spacing.
template <Items kItems>
BLINK_FN uint32_t guess_byte(const Walk<kItems>& walk, const Spacing& s) {
  const uint32_t byte = walk.guess();
  const Gap gap = is_closing(byte) && Gap(s.gap) != Gap::kOpen ? Gap::kClose : Gap(s.gap);
  if (s.in_string || gap == Gap::kNone) return byte;
  const uint32_t run = expected_run(s, gap), space = next_space(s, gap, run);
  if (space != kNoGuess && walk.may_take(uint8_t(space))) return space;
  return byte == ' ' && run != kUnknownRun ? guess_value(walk) : byte;
}

}  // namespace blink
