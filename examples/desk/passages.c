/* Passages that an answer attended, as places in the document's text. */
#include <string.h>

#include "sequence.h"

enum {
  max_passages = 4,
  around = 240,    /* bytes on each side that are searched for the end of a sentence */
  max_quote = 320, /* bytes */
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

static gsize back_to(const char* text, gsize size, gsize at, gsize min, gboolean sentence) {
  gsize to = at;
  while (to > min && !(sentence ? ends_sentence(text, to) : ends_word(text, size, to))) --to;
  return to > min || to == 0 ? to : G_MAXSIZE;
}

static gsize on_to(const char* text, gsize size, gsize at, gsize max, gboolean sentence) {
  gsize to = at;
  while (to < max && !(sentence ? ends_sentence(text, to) : ends_word(text, size, to))) ++to;
  return to < max || to == size ? to : G_MAXSIZE;
}

void desk_passage_widen(const char* text, gsize size, gsize* begin, gsize* end) {
  while (*begin < *end && g_ascii_isspace(text[*begin])) ++*begin;
  const gsize min = *begin > around ? *begin - around : 0, max = MIN(size, *end + around);
  gsize from = back_to(text, size, *begin, min, TRUE), to = on_to(text, size, *end, max, TRUE);
  if (from == G_MAXSIZE) from = back_to(text, size, *begin, min, FALSE);
  if (to == G_MAXSIZE) to = on_to(text, size, *end, max, FALSE);
  if (from == G_MAXSIZE) from = *begin;
  if (to == G_MAXSIZE) to = *end;
  while (from > 0 && inside_character(text, size, from)) --from;
  while (to < size && inside_character(text, size, to)) ++to;
  while (to > from && g_ascii_isspace(text[to - 1])) --to;
  *begin = from;
  *end = to;
}

/* One line of at most max_quote bytes and of whole characters. */
static char* quote_of(const char* text, gsize begin, gsize end) {
  GString* line = g_string_new(NULL);
  gsize at = begin;
  for (; at < end && (line->len < max_quote || inside_character(text, end, at)); ++at) {
    if (!g_ascii_isspace(text[at])) g_string_append_c(line, text[at]);
    else if (line->len > 0 && line->str[line->len - 1] != ' ') g_string_append_c(line, ' ');
  }
  if (at < end) g_string_append(line, "…");
  return g_string_free(line, FALSE);
}

static void free_passage(gpointer pointer) {
  DeskPassage* passage = pointer;
  g_free(passage->quote);
  g_free(passage->document);
  g_free(passage);
}

GPtrArray* desk_passages_new(void) { return g_ptr_array_new_with_free_func(free_passage); }

DeskPassage* desk_passage_of(const char* text, gsize size, const kv_passage* raw) {
  if (raw->first_byte >= size || raw->bytes == 0) return NULL; /* unknown */
  gsize begin = raw->first_byte, end = MIN(begin + raw->bytes, size);
  DeskPassage* passage = g_new0(DeskPassage, 1);
  passage->share = (double)raw->share;
  passage->at = (double)begin / (double)size;
  desk_passage_widen(text, size, &begin, &end);
  passage->begin = begin;
  passage->end = end;
  passage->quote = quote_of(text, begin, end);
  return passage;
}

kv_status desk_passages_of(const DeskSequence* sequence, GPtrArray** out, kv_error* error) {
  kv_passage raw[64]; /* the maximum */
  size_t count = 0;
  const kv_status status =
      kv_session_passages(sequence->session, raw, G_N_ELEMENTS(raw), &count, error);
  if (status != KV_OK) return status;
  gsize size = 0;
  const char* text = g_bytes_get_data(sequence->text, &size);
  GPtrArray* passages = desk_passages_new();
  for (gsize i = 0; i < count && passages->len < max_passages; ++i) {
    DeskPassage* passage = desk_passage_of(text, size, &raw[i]);
    if (passage) g_ptr_array_add(passages, passage);
  }
  *out = passages;
  return KV_OK;
}
