/* The text of a file: plain text, Markdown, PDF. */
#ifndef DESK_TEXT_H
#define DESK_TEXT_H

#include <gio/gio.h>

/* UTF-8 without NULs, and not empty. Any thread. *remark, freed with g_free, is a change of the
 * text that the user should know of, or NULL. The error's message is a reason for the user. */
GBytes* desk_text_load(GFile* file, GCancellable* cancellable, char** remark, GError** error);

#endif
