/* Questions and answers of a document, in a file next to its cache file. Only the user may read the
 * file (mode 0600). */
#ifndef DESK_CONVERSATION_H
#define DESK_CONVERSATION_H

#include "answer.h"

typedef struct DeskConversation {
  GPtrArray* answers; /* of DeskAnswer, the oldest first */
  double part;        /* of the text that was prefilled, 0 to 1; -1: unknown */
} DeskConversation;

/* Reads a file. Without one, or with a damaged one, the conversation is empty. Any thread. */
DeskConversation desk_conversation_load(const char* path);

/* The content of the file. Main loop only. Freed with g_free. */
char* desk_conversation_format(const DeskConversation* conversation);

/* Writes the file atomically. Any thread. */
gboolean desk_conversation_save(const char* path, const char* content, GError** error);

#endif
