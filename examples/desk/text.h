/* The text of a file: plain text, Markdown, PDF. */
#ifndef DESK_TEXT_H
#define DESK_TEXT_H

#include <gio/gio.h>

/* UTF-8 without NULs, and not empty. Any thread. *remark, freed with g_free: what was done to the text that its reader should know, or NULL. */
GBytes* desk_text_load(GFile* file, GCancellable* cancellable, char** remark, GError** error);

#endif
