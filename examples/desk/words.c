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

char* desk_percent(double share) {
  return g_strdup_printf(share < 0.0995 ? "%.1f%%" : "%.0f%%", 100 * share);
}

static char* counted(guint64 count, const char* unit, const char* end) {
  return g_strdup_printf("%" G_GUINT64_FORMAT " %s%s%s", count, unit, count == 1 ? "" : "s", end);
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

/* By days: it stays true while the window is open. */
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
