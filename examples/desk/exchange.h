/* A question, its answer, and the passages that the answer attended. */
#ifndef DESK_EXCHANGE_H
#define DESK_EXCHANGE_H

#include <adwaita.h>

#include "answer.h"

#define DESK_TYPE_EXCHANGE (desk_exchange_get_type())
G_DECLARE_FINAL_TYPE(DeskExchange, desk_exchange, DESK, EXCHANGE, AdwBin)

/* Signal "show-passage" with the number of a passage in the answer's outcome. */
GtkWidget* desk_exchange_new(DeskAnswer* answer);
DeskAnswer* desk_exchange_answer(DeskExchange* exchange);

#endif
