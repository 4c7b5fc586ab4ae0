/* A question and its answer. The document that answers writes it, a DeskExchange shows it. Main
 * loop only, unless a function says otherwise. */
#ifndef DESK_ANSWER_H
#define DESK_ANSWER_H

#include <glib-object.h>

#include "sequence.h"

typedef enum DeskAnswerState {
  DESK_ANSWER_WAITING, /* for a prefill, or another answer */
  DESK_ANSWER_COMING,
  DESK_ANSWER_WHOLE,
  DESK_ANSWER_STOPPED, /* by the user */
  DESK_ANSWER_FAILED
} DeskAnswerState;

#define DESK_TYPE_ANSWER (desk_answer_get_type())
G_DECLARE_FINAL_TYPE(DeskAnswer, desk_answer, DESK, ANSWER, GObject)

/* The writer of a field calls desk_answer_changed, which emits "changed". */
struct _DeskAnswer {
  GObject parent;
  char* question;
  GString* text;
  DeskAnswerState state;
  DeskOutcome outcome;
  char* failure;
  gboolean again; /* asked a second time, after the document was prefilled again */
};

DeskAnswer* desk_answer_new(const char* question);
void desk_answer_changed(DeskAnswer* answer);

/* A kv_text_fn whose user is a DeskAnswer, which the text joins on the main loop. Any thread. */
int32_t desk_answer_on_text(const char* text, size_t size, void* answer);

#endif
