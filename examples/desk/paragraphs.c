#include "paragraphs.h"

#include <string.h>

static glong longest_of(char** lines) {
  glong longest = 0;
  for (char** line = lines; *line; ++line) longest = MAX(longest, g_utf8_strlen(*line, -1));
  return longest;
}

static gboolean is_lower_at(const char* text) { return g_unichar_islower(g_utf8_get_char(text)); }

/* Whether a hyphen at the end of `text` divides a word that goes on with `next`. */
static gboolean divides_word(const GString* text, const char* next) {
  if (text->len < 2 || text->str[text->len - 1] != '-' || !is_lower_at(next)) return FALSE;
  return is_lower_at(g_utf8_prev_char(text->str + text->len - 1));
}

void desk_append_paragraphs(GString* text, const char* page) {
  g_auto(GStrv) lines = g_strsplit(page, "\n", -1);
  for (char** line = lines; *line; ++line) g_strchomp(*line);
  const glong longest = longest_of(lines);
  gboolean continues = FALSE;
  for (char** line = lines; *line; ++line) {
    if (line > lines) {
      if (!continues || !**line) g_string_append_c(text, '\n');
      else if (divides_word(text, *line)) g_string_truncate(text, text->len - 1);
      else g_string_append_c(text, ' ');
    }
    g_string_append(text, *line);
    continues = **line && 4 * g_utf8_strlen(*line, -1) >= 3 * longest;
  }
}
