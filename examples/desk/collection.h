/* The work behind questions about all documents: compose their cache files, answer, find the
 * sources. Independent of any window. */
#ifndef DESK_COLLECTION_H
#define DESK_COLLECTION_H

#include "document.h"
#include "sequence.h"

/* Answers over all cache files of the shelf. Documents that came or went since the last question
 * count: nothing is kept. Fills *outcome also for a stopped answer. Any thread. */
kv_status desk_collection_ask(const DeskShelf* shelf, kv_model* model, const DeskAsking* asking,
                              DeskOutcome* outcome, kv_error* error);

#endif
