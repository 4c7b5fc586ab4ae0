/* Numbers, times and failures in words. Strings are freed with g_free. */
#ifndef DESK_WORDS_H
#define DESK_WORDS_H

#include <glib.h>
#include <kvasir.h>

char* desk_grouped(guint64 number);        /* 60,677 */
char* desk_percent(double part);           /* 43%, 1.6% */
char* desk_pages(guint64 bytes);           /* of a text: "about 31 pages"; "" for 0 */
char* desk_time_left(double seconds);      /* "about 2 minutes left" */
char* desk_ago(gint64 seconds_since_1970); /* "today", "3 days ago" */

/* A sentence for the user. It is the library's `message` only where the status says too little. */
char* desk_failure(kv_status status, const char* message);

#endif
