/* The passages that an answer attended, as places in the document's text. */
#include <string.h>

#include "reading.h"

enum {
  max_passages = 4,
  around = 240 /* bytes on each side in which the ends of a sentence are looked for */,
  longest_quote = 320 /* bytes */
};

static gboolean ends_sentence(const char* text, gsize at) {
  if (at < 2 || !g_ascii_isspace(text[at - 1])) return FALSE;
  const char before = text[at - 2];
  return before == '.' || before == '!' || before == '?' ||
         (before == '\n' && text[at - 1] == '\n');
}

static gboolean inside_character(const char* text, gsize size, gsize at) {
  return at < size && ((guchar)text[at] & 0xC0) == 0x80;
}

static gboolean ends_word(const char* text, gsize size, gsize at) {
  return at == 0 || at >= size || g_ascii_isspace(text[at]) || g_ascii_isspace(text[at - 1]);
}

static gsize back_to(const char* text, gsize size, gsize at, gsize least, gboolean sentence) {
  gsize to = at;
  while (to > least && !(sentence ? ends_sentence(text, to) : ends_word(text, size, to))) --to;
  return to > least || to == 0 ? to : G_MAXSIZE;
}

static gsize on_to(const char* text, gsize size, gsize at, gsize most, gboolean sentence) {
  gsize to = at;
  while (to < most && !(sentence ? ends_sentence(text, to) : ends_word(text, size, to))) ++to;
  return to < most || to == size ? to : G_MAXSIZE;
}

void desk_passage_widen(const char* text, gsize size, gsize* begin, gsize* end) {
  while (*begin < *end && g_ascii_isspace(text[*begin])) ++*begin;
  const gsize least = *begin > around ? *begin - around : 0, most = MIN(size, *end + around);
  gsize from = back_to(text, size, *begin, least, TRUE), to = on_to(text, size, *end, most, TRUE);
  if (from == G_MAXSIZE) from = back_to(text, size, *begin, least, FALSE);
  if (to == G_MAXSIZE) to = on_to(text, size, *end, most, FALSE);
  if (from == G_MAXSIZE) from = *begin;
  if (to == G_MAXSIZE) to = *end;
  while (from > 0 && inside_character(text, size, from)) --from;
  while (to < size && inside_character(text, size, to)) ++to;
  while (to > from && g_ascii_isspace(text[to - 1])) --to;
  *begin = from;
  *end = to;
}

/* One line of at most the longest quote, by whole characters. */
static char* quote_of(const char* text, gsize begin, gsize end) {
  GString* line = g_string_new(NULL);
  gsize at = begin;
  for (; at < end && (line->len < longest_quote || inside_character(text, end, at)); ++at) {
    if (!g_ascii_isspace(text[at])) g_string_append_c(line, text[at]);
    else if (line->len > 0 && line->str[line->len - 1] != ' ') g_string_append_c(line, ' ');
  }
  if (at < end) g_string_append(line, "…");
  return g_string_free(line, FALSE);
}

static void free_passage(gpointer pointer) {
  DeskPassage* passage = pointer;
  g_free(passage->quote);
  g_free(passage);
}

int32_t* desk_tokens_of(const DeskReading* reading, gsize* count) {
  *count = 0;
  kv_session_tokens(reading->session, NULL, 0, count, NULL);
  int32_t* tokens = g_new(int32_t, *count + 1);
  if (kv_session_tokens(reading->session, tokens, *count, count, NULL) != KV_OK) *count = 0;
  return tokens;
}

gsize desk_bytes_of_tokens(const DeskReading* reading, const int32_t* tokens, gsize count) {
  size_t size = 0;
  kv_detokenize(reading->model, tokens, count, 0, NULL, 0, &size, NULL);
  return size;
}

static DeskPassage* passage_of(const DeskReading* reading, const kv_span* span,
                               const int32_t* tokens, gsize count) {
  gsize size = 0;
  const char* text = g_bytes_get_data(reading->text, &size);
  const gsize first = MIN(span->first_token, count), behind = MIN(first + span->tokens, count);
  gsize begin = desk_bytes_of_tokens(reading, tokens, first),
        end = desk_bytes_of_tokens(reading, tokens, behind);
  begin = MIN(begin > reading->marks ? begin - reading->marks : 0, size);
  end = MIN(end > reading->marks ? end - reading->marks : 0, size);
  if (begin >= end) return NULL; /* it was nothing but marks */
  DeskPassage* passage = g_new0(DeskPassage, 1);
  passage->share = (double)span->share;
  passage->at = (double)begin / (double)size;
  desk_passage_widen(text, size, &begin, &end);
  passage->begin = begin;
  passage->end = end;
  passage->quote = quote_of(text, begin, end);
  return passage;
}

kv_status desk_passages_of(const DeskReading* reading, GPtrArray** out, kv_error* error) {
  kv_span spans[64]; /* as many as there are at most */
  size_t count = 0;
  const kv_status status = kv_trace(reading->session, spans, G_N_ELEMENTS(spans), &count, error);
  if (status != KV_OK) return status;
  GPtrArray* passages = g_ptr_array_new_with_free_func(free_passage);
  gsize all = 0;
  g_autofree int32_t* tokens = desk_tokens_of(reading, &all);
  for (gsize i = 0; i < count && passages->len < max_passages; ++i) {
    DeskPassage* passage = passage_of(reading, &spans[i], tokens, all);
    if (passage) g_ptr_array_add(passages, passage);
  }
  *out = passages;
  return KV_OK;
}
