// SPDX-License-Identifier: Apache-2.0
// Drafts: tokens that may follow a text, computed with its newest token in the same step.
//
// Noise depends on seed and position alone, so each row samples what plain decoding would. A draft is accepted as far
// as its tokens are those that were sampled. No result depends on the origin of a draft.
//
// Drafts take only free rows, blocks and completion queue entries. The cost table decides their length: the one that
// gives the most tokens for the time, within what drafts may cost (draft_credit.h).
#pragma once

#include "scheduler/admission.h"
#include "scheduler/answers.h"
#include "scheduler/draft_credit.h"
#include "scheduler/grammar_drafts.h"
#include "scheduler/head_drafts.h"

namespace blink {

constexpr uint32_t kChanceSpan = 4;     // drafts over which the chance is averaged
constexpr uint32_t kMostMisses = 4;     // in a row, before a sequence rests
constexpr uint32_t kLongestRest = 256;  // tokens; a rest is twice as long as the one before, while nothing is accepted
constexpr uint32_t kWorthwhile = 32;    // part of the tokens for the time by which a longer draft has to win

// Whether rows of the whole step that is composed or in flight have siblings: rows of the same sequence behind them.
BLINK_FN bool has_siblings(const State& s) { return s.num_drafts > 0; }

BLINK_FN const OriginRecord& record_of(const Sequence& q, DraftOrigin origin) {
  return q.drafting.records[uint32_t(origin)];
}
BLINK_FN OriginRecord& record_of(Sequence& q) { return q.drafting.records[uint32_t(q.drafting.origin)]; }

// Whether a sequence has drafts of an origin at all.
BLINK_FN bool has_origin(const State& s, const Sequence& q, DraftOrigin origin) {
  switch (origin) {
    case DraftOrigin::kText:
      return true;
    case DraftOrigin::kGrammar:
      return is_guessed(s, q);
    case DraftOrigin::kAnswers:
      return has_answers(s);
    default:
      return s.geometry.has_draft_head;
  }
}

// Whether drafts of an origin are made for a sequence once it has so many generated tokens.
BLINK_FN bool may_draft(const State& s, const Sequence& q, DraftOrigin origin, uint32_t num_generated) {
  return speculates(s) && has_origin(s, q, origin) && num_generated >= record_of(q, origin).rests_until;
}

// The texts that drafts are copied from now: kFromText, kFromAnswers, both or none.
using DraftSources = uint32_t;
constexpr DraftSources kFromText = 1, kFromAnswers = 2;
BLINK_FN DraftSources draft_sources(const State& s, const Sequence& q, uint32_t num_generated) {
  return (may_draft(s, q, DraftOrigin::kText, num_generated) ? kFromText : 0) |
         (may_draft(s, q, DraftOrigin::kAnswers, num_generated) ? kFromAnswers : 0);
}

// What is known of a sequence's drafts behind its next token before that is sampled.
struct Foresight {
  bool is_open;      // there may be some, whatever is sampled
  uint8_t looks_up;  // DraftSources, where the token decides
  uint8_t guesses;   // likewise, whether the sequence's automaton does
};
BLINK_FN Foresight foresee(const State& s, const Sequence& q) {
  const uint32_t num_generated = q.num_generated + 1;
  const DraftSources sources = draft_sources(s, q, num_generated);
  const bool has_head = may_draft(s, q, DraftOrigin::kHead, num_generated);
  return {has_head || (sources > 0 && q.drafting.source > 0), uint8_t(sources),
          may_draft(s, q, DraftOrigin::kGrammar, num_generated)};
}

// Where to copy from what follows the text's first `end` tokens: of both texts that with the longer match. kNone: they
// stand nowhere else.
BLINK_FN uint32_t find_source(const State& s, const Sequence& q, uint32_t end, DraftSources sources) {
  const uint32_t own = sources & kFromText ? look_up(s, q, end) : kNone;
  const uint32_t other = sources & kFromAnswers ? look_up_answers(s, q, end) : kNone;
  if (own == kNone || other == kNone) return own == kNone ? other : own;
  const uint32_t depth = s.geometry.suffix_depth;
  return match_length(s, q, other, end, depth) > match_length(s, q, own, end, depth) ? other : own;
}

// The origin of a copy from a place.
BLINK_FN DraftOrigin origin_of(const State& s, uint32_t place) {
  return place < first_answer_place(s) ? DraftOrigin::kText : DraftOrigin::kAnswers;
}

// The most tokens of a draft that a sequence can deliver beside the next one.
BLINK_FN uint32_t draft_limit(const State& s, const Sequence& q) {
  const uint32_t answer = q.sqe.max_tokens - q.num_generated, text = s.geometry.max_model_len - q.num_tokens;
  return least(least(s.geometry.spec_tokens, most_uncertain_tokens(s, q)), least(answer, text) - 1);
}

// How many tokens may be copied from a place: with suffix decoding the more, the longer the match before it is. The
// draft ends where its tokens are no longer likely enough to be accepted all. A prediction is copied whatever it
// matches.
BLINK_FN uint32_t copy_limit(const State& s, const Sequence& q, uint32_t place) {
  const Geometry& g = s.geometry;
  const uint32_t limit = draft_limit(s, q);
  const bool is_prediction = place >= g.max_model_len && place < first_answer_place(s);
  if (g.suffix_depth == 0 || is_prediction) return limit;
  const uint32_t match = match_length(s, q, place, q.num_tokens, g.suffix_depth);
  const uint32_t most_tokens = least(limit, most(g.suffix_factor * match / kSureChance, 1u));
  const uint32_t chance = record_of(q, origin_of(s, place)).chance;
  uint32_t count = least(most_tokens, 1u);
  for (uint32_t all = chance; count < most_tokens; count++)
    if ((all = all * chance / kSureChance) < g.suffix_chance) break;
  return count;
}

// Copy a draft from where the text's end stood before, as far as there is such a place. A guess that is there stays
// where the copy is shorter or another.
template <class Env>
BLINK_FN void copy_draft(Env& env, const State& s, Sequence& q, DraftSources sources) {
  Drafting& d = q.drafting;
  index_text(env, s, q, q.num_tokens - 1);
  if (d.source == 0) d.source = find_source(s, q, q.num_tokens, sources) + 1;  // 0 of kNone
  if (d.source == 0) return;
  const uint32_t limit = copy_limit(s, q, d.source - 1), num_guessed = d.num_found;
  int32_t* draft = tokens_of(s, q.slot) + q.num_tokens;
  uint32_t count = 0, place = d.source - 1;
  for (; count < limit && has_token(s, q, place, q.num_tokens + count); place = place_after(s, place), count++) {
    const int32_t token = token_at(s, q, place);
    if (count < num_guessed && token != draft[count]) return;
    draft[count] = token;
  }
  if (count < num_guessed) return;
  d.num_found = count;
  d.origin = origin_of(s, d.source - 1);
  d.is_prediction = d.origin == DraftOrigin::kText && d.source > s.geometry.max_model_len;
}

// Take the guess that guess_next_tokens() has written behind the sequence's text, if it has.
BLINK_FN void take_guess(Sequence& q) {
  Drafting& d = q.drafting;
  d.num_found = d.guessed_at == q.num_tokens ? d.num_guessed : 0;
  d.is_prediction = 0;
  d.origin = DraftOrigin::kGrammar;
}

// Write a draft behind the sequence's text, where nothing is read before it is accepted. Runs on: one lane for each
// sequence.
template <class Env>
BLINK_FN void find_draft(Env& env, const State& s, Sequence& q) {
  q.drafting.num_found = 0;
  const bool is_plain = q.row.kind == RowKind::kDecode && q.row.num_samples == 1;
  if (!is_plain || q.paused_tokens > 0) return;
  take_guess(q);
  if (const DraftSources sources = draft_sources(s, q, q.num_generated)) copy_draft(env, s, q, sources);
  if (may_draft(s, q, DraftOrigin::kHead, q.num_generated)) take_head_draft(s, q, draft_limit(s, q));
}

// Write what their automata leave no choice of behind the texts of running sequences, before a step is composed. It is
// not a part of that: a kernel needs the registers of all functions that are open at once.
template <class Env>
BLINK_RARE_FN void guess_next_tokens(Env& env, State& s) {
  if (s.geometry.token_entries == 0) return;
  for (uint32_t i = env.lane(); i < s.num_running; i += env.lanes()) {
    Sequence& q = s.sequences[s.running[i]];
    if (!is_decoding(q) || q.num_generated == 0 || !is_guessed(s, q)) continue;
    read_spacing(s, q, q.num_tokens - 1);
    if (!may_draft(s, q, DraftOrigin::kGrammar, q.num_generated)) continue;
    q.drafting.num_guessed = guess_tokens(s, q, draft_limit(s, q), tokens_of(s, q.slot) + q.num_tokens);
    q.drafting.guessed_at = q.num_tokens;
  }
  env.sync();
}

// What drafts of at most so many tokens add to a step.
struct DraftTotals {
  uint32_t tokens, blocks, context, gain;  // gain: expected tokens, of kSureChance
};
BLINK_FN DraftTotals operator+(DraftTotals a, DraftTotals b) {
  return {a.tokens + b.tokens, a.blocks + b.blocks, a.context + b.context, a.gain + b.gain};
}

// How many tokens of a draft are expected to be accepted, of kSureChance each.
BLINK_FN uint32_t expected_gain(uint32_t chance, uint32_t num_drafts) {
  uint32_t gain = 0, all = kSureChance;
  for (uint32_t i = 0; i < num_drafts; i++) gain += all = all * chance / kSureChance;
  return gain;
}

template <class Env>
BLINK_RARE_FN DraftTotals draft_totals(Env& env, const State& s, uint32_t longest) {
  DraftTotals t{};
  for (uint32_t i = env.lane(); i < s.num_running; i += env.lanes()) {
    const Sequence& q = s.sequences[s.running[i]];
    const uint32_t drafts = least(q.drafting.num_found, longest);
    if (drafts == 0) continue;
    const uint32_t end = q.num_computed + 1;
    t.tokens += drafts;
    t.blocks += missing_blocks(s, q, end + drafts) - missing_blocks(s, q, end);
    t.context += drafts * end;
    t.gain += expected_gain(record_of(q, q.drafting.origin).chance, drafts);
  }
  return env.sum(t);
}

// How long drafts may be, and whether the credit alone keeps them from being longer.
struct DraftLength {
  uint32_t longest;
  bool lacks_credit;
};

// As long as gives the most tokens for the time of the step, within rows, blocks and credit.
template <class Env>
BLINK_RARE_FN DraftLength choose_longest(Env& env, const State& s, const StepTotals& total) {
  const Geometry& g = s.geometry;
  const uint32_t most_rows = g.graphs[g.num_decode_graphs - 1].rows;
  const uint64_t plain_ns = has_costs(s) ? predict_decode_ns(s, total.tokens, total.context) : 1;
  DraftLength chosen{0, false};
  uint32_t tokens_before = 0;
  uint64_t best_tokens = uint64_t(total.tokens) * kSureChance, best_ns = plain_ns;
  for (uint32_t longest = 1; longest <= g.spec_tokens; longest++) {
    const DraftTotals t = draft_totals(env, s, longest);
    const uint32_t rows = total.tokens + t.tokens;
    const bool fits = rows <= most_rows && total.blocks + t.blocks <= available_growth(s);
    if (!fits || t.tokens == tokens_before) break;
    tokens_before = t.tokens;
    const uint64_t tokens = uint64_t(total.tokens) * kSureChance + t.gain;
    const uint64_t ns = has_costs(s) ? predict_decode_ns(s, rows, total.context + t.context) : 1;
    if (tokens * best_ns * kWorthwhile <= best_tokens * ns * (kWorthwhile + has_costs(s))) continue;
    chosen.lacks_credit = !may_cost(s, total.tokens, plain_ns, ns);
    if (chosen.lacks_credit) continue;
    chosen.longest = longest;
    best_tokens = tokens;
    best_ns = ns;
  }
  return chosen;
}

// Let a sequence make no more drafts of its last one's origin for so many tokens: its steps take the fast path.
BLINK_FN void rest(const State& s, Sequence& q, uint32_t num_tokens) {
  record_of(q).rests_until = q.num_generated + num_tokens;
  const DraftOrigin origin = q.drafting.origin;
  if (origin == DraftOrigin::kHead) s.head_drafts[q.slot].rests_until = q.num_tokens + num_tokens;
  if (origin == DraftOrigin::kText || origin == DraftOrigin::kAnswers) q.drafting.source = 0;
  q.drafting.num_found = 0;
}

// Note that a draft was of no use. Some in a row, and the sequence rests.
BLINK_FN void note_miss(const State& s, Sequence& q) {
  OriginRecord& record = record_of(q);
  if (++record.num_misses < kMostMisses) return;
  record.num_misses = kMostMisses - 1;
  rest(s, q, record.next_rest);
  record.next_rest = least(2 * record.next_rest, kLongestRest);
  record.chance = kFirstChance;
}

// Let the decode rows of a step that has nothing else verify drafts too. Returns what the step takes then.
template <class Env>
BLINK_RARE_FN StepTotals choose_drafts(Env& env, State& s, const StepTotals& total) {
  for (uint32_t i = env.lane(); i < s.num_running; i += env.lanes()) find_draft(env, s, s.sequences[s.running[i]]);
  if (env.lane() == 0) earn_draft_credit(s);
  env.sync();
  const auto [longest, lacks_credit] = choose_longest(env, s, total);
  for (uint32_t i = env.lane(); i < s.num_running; i += env.lanes()) {
    Sequence& q = s.sequences[s.running[i]];
    const uint32_t found = q.drafting.num_found;
    q.drafting.num_found = least(found, longest);
    if (found > 0 && longest == 0) lacks_credit ? rest(s, q, kFirstRest) : note_miss(s, q);
    env.fetch_add(s.qps[q.queue_pair].cq_drafts, q.drafting.num_found * completions_per_sample(s, q));
  }
  env.sync();
  uint32_t drafts = 0;
  for (uint32_t i = env.lane(); i < s.num_running; i += env.lanes()) {
    Sequence& q = s.sequences[s.running[i]];
    const QueuePairState& pair = s.qps[q.queue_pair];
    if (q.drafting.num_found == 0 || pair.cq_drafts > cq_room(s, pair)) continue;
    q.row.kind = RowKind::kVerify;
    q.row.num_tokens = q.row.num_samples = 1 + q.drafting.num_found;
    drafts += q.drafting.num_found;
  }
  drafts = env.sum(drafts);
  for (uint32_t qp = env.lane(); qp < s.geometry.num_queue_pairs; qp += env.lanes()) {
    QueuePairState& pair = s.qps[qp];
    if (pair.cq_drafts <= cq_room(s, pair)) pair.cq_need += pair.cq_drafts;
    pair.cq_drafts = 0;
  }
  if (env.lane() == 0) {
    s.num_drafts = drafts;
    if (drafts > 0 && has_costs(s))
      open_draft_account(s, total.tokens, predict_decode_ns(s, total.tokens, total.context));
  }
  env.sync();
  return drafts > 0 ? step_totals(env, s) : total;
}

// Keep up with the text that drafts are copied from, before a sampled token becomes the sequence's next.
BLINK_FN void follow_source(const State& s, Sequence& q, int32_t token) {
  uint32_t& source = q.drafting.source;
  if (source == 0) return;
  const bool is_same = has_token(s, q, source - 1, q.num_tokens) && token_at(s, q, source - 1) == token;
  source = is_same ? place_after(s, source - 1) + 1 : 0;
}

// Learn from a draft of which so many tokens were accepted.
template <class Env>
BLINK_FN void note_draft(Env& env, State& s, Sequence& q, uint32_t drafts, uint32_t accepted) {
  OriginRecord& record = record_of(q);
  const uint32_t chance = kSureChance * accepted / least(accepted + 1, drafts);
  record.chance = (record.chance * (kChanceSpan - 1) + chance) / kChanceSpan;
  q.drafting.num_uncharged += accepted;
  env.fetch_add(s.draft_counts[0], 1);
  env.fetch_add(s.draft_counts[1], drafts);
  for (uint32_t i = 0; i < accepted; i++) env.fetch_add(s.draft_counts[2 + i], 1);
  if (accepted == 0) return note_miss(s, q);
  record.num_misses = 0;
  record.next_rest = kFirstRest;
}

// Add what the step's drafts came to. Runs on: one lane.
BLINK_FN void count_drafts(State& s) {
  Statistics& t = s.statistics;
  uint32_t accepted = 0;
  t.num_drafts += s.draft_counts[0];
  t.draft_tokens += s.draft_counts[1];
  for (uint32_t i = 0; i < kMaxDrafts; i++) {
    t.accepted_at[i] += s.draft_counts[2 + i];
    accepted += s.draft_counts[2 + i];
  }
  t.accepted_tokens += accepted;
  close_draft_account(s, accepted);
  for (uint32_t& count : s.draft_counts) count = 0;
  s.num_drafts = 0;
}

// Forget where the automaton stood behind tokens that were not accepted. Runs on: one lane for each sequence.
BLINK_FN void take_back_places(State& s, const Sequence& q) {
  const uint32_t count = lists_of_slot(s.geometry);
  AutomatonPlace* places = s.automaton_places + uint64_t(q.slot) * count;
  for (uint32_t i = 0; q.automaton != kNone && i < count; i++)
    if (places[i].num_generated != kNoPlace && places[i].num_generated >= q.num_generated)
      places[i].num_generated = kNoPlace;
}

}  // namespace blink
