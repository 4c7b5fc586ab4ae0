/* Numbers and times in words. Strings are freed with g_free. */
#ifndef DESK_WORDS_H
#define DESK_WORDS_H

#include <glib.h>

char* desk_grouped(guint64 number);        /* 60,677 */
char* desk_percent(double share);          /* 43%, 1.6% */
char* desk_time_left(double seconds);      /* "about 2 minutes left" */
char* desk_ago(gint64 seconds_since_1970); /* "today", "3 days ago" */

#endif
