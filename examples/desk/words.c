#include "words.h"

#include <string.h>

char* desk_grouped(guint64 number) {
  g_autofree char* digits = g_strdup_printf("%" G_GUINT64_FORMAT, number);
  GString* text = g_string_new(NULL);
  for (const char* d = digits; *d; ++d) {
    if (d > digits && strlen(d) % 3 == 0) g_string_append_c(text, ',');
    g_string_append_c(text, *d);
  }
  return g_string_free(text, FALSE);
}

char* desk_percent(double part) {
  return g_strdup_printf(part < 0.0995 ? "%.1f%%" : "%.0f%%", 100 * part);
}

static char* counted(guint64 count, const char* unit, const char* end) {
  return g_strdup_printf("%" G_GUINT64_FORMAT " %s%s%s", count, unit, count == 1 ? "" : "s", end);
}

char* desk_pages(guint64 bytes) {
  static const guint64 page = 2000; /* bytes of a printed page */
  const guint64 pages = (bytes + page - 1) / page;
  if (pages == 0) return g_strdup("");
  if (pages == 1) return g_strdup("about 1 page");
  g_autofree char* number = desk_grouped(pages);
  return g_strdup_printf("about %s pages", number);
}

static const char* failure_of(kv_status status) {
  switch (status) {
    case KV_NO_MEMORY:
      return "This computer has too little memory.";
    case KV_NO_SPACE:
      return "The disk is full.";
    case KV_PERMISSION:
      return "Access to a file is not permitted.";
    case KV_IO:
      return "A file could not be read or written.";
    case KV_NOT_A_CACHE:
    case KV_CORRUPT:
      return "A file is damaged.";
    case KV_CONTEXT_FULL:
      return "The text is too long for the model.";
    case KV_LIMIT:
      return "This computer has too few resources: close other programs.";
    default:
      return NULL;
  }
}

/* Capital letter first, full stop last. */
static char* sentence(const char* message) {
  g_autofree char *first = g_utf8_substring(message, 0, MIN(1, g_utf8_strlen(message, -1))),
                  *upper = g_utf8_strup(first, -1);
  return g_strdup_printf("%s%s%s", upper, message + strlen(first),
                         g_str_has_suffix(message, ".") ? "" : ".");
}

char* desk_failure(kv_status status, const char* message) {
  const char* known = failure_of(status);
  return known ? g_strdup(known) : sentence(message);
}

char* desk_time_left(double seconds) {
  if (seconds < 0) return g_strdup("estimating the time left");
  if (seconds < 8) return g_strdup("a few seconds left");
  if (seconds < 55) return g_strdup_printf("about %d seconds left", ((int)seconds + 5) / 10 * 10);
  if (seconds < 55 * 60) {
    g_autofree char* minutes = counted((guint64)((seconds + 30) / 60), "minute", " left");
    return g_strconcat("about ", minutes, NULL);
  }
  g_autofree char* hours = counted((guint64)((seconds + 1800) / 3600), "hour", " left");
  return g_strconcat("about ", hours, NULL);
}

/* In days, which stay true while the window is open. */
char* desk_ago(gint64 seconds_since_1970) {
  g_autoptr(GDateTime) then = g_date_time_new_from_unix_local(seconds_since_1970),
                       now = g_date_time_new_now_local();
  GDate then_day, now_day;
  g_date_clear(&then_day, 1);
  g_date_clear(&now_day, 1);
  g_date_set_dmy(&then_day, (GDateDay)g_date_time_get_day_of_month(then),
                 (GDateMonth)g_date_time_get_month(then), (GDateYear)g_date_time_get_year(then));
  g_date_set_dmy(&now_day, (GDateDay)g_date_time_get_day_of_month(now),
                 (GDateMonth)g_date_time_get_month(now), (GDateYear)g_date_time_get_year(now));
  const int days = g_date_days_between(&then_day, &now_day);
  if (days <= 0) return g_strdup("today");
  if (days == 1) return g_strdup("yesterday");
  return days < 14 ? g_strdup_printf("%d days ago", days) : g_date_time_format(then, "%e %B %Y");
}
