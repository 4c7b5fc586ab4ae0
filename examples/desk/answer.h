/* A question and what becomes of it: written by the document that answers, shown by a DeskExchange. Main loop only. */
#ifndef DESK_ANSWER_H
#define DESK_ANSWER_H

#include <glib-object.h>

#include "reading.h"

typedef enum DeskAnswerState {
  DESK_ANSWER_WAITING, /* for a reading, or another answer */
  DESK_ANSWER_COMING,
  DESK_ANSWER_WHOLE,
  DESK_ANSWER_STOPPED, /* by its reader */
  DESK_ANSWER_FAILED
} DeskAnswerState;

#define DESK_TYPE_ANSWER (desk_answer_get_type())
G_DECLARE_FINAL_TYPE(DeskAnswer, desk_answer, DESK, ANSWER, GObject)

/* Fields are for reading; whoever writes them emits "changed" by desk_answer_changed. */
struct _DeskAnswer {
  GObject parent;
  char* question;
  GString* text;
  DeskAnswerState state;
  DeskOutcome outcome;
  char* failure;
  gboolean again; /* it was asked a second time, over a document that was read again */
};

DeskAnswer* desk_answer_new(const char* question);
void desk_answer_changed(DeskAnswer* answer);

#endif
