#include "answer.h"

G_DEFINE_TYPE(DeskAnswer, desk_answer, G_TYPE_OBJECT)

static guint changed;

static void desk_answer_finalize(GObject* object) {
  DeskAnswer* self = DESK_ANSWER(object);
  g_free(self->question);
  g_string_free(self->text, TRUE);
  desk_outcome_clear(&self->outcome);
  g_free(self->failure);
  G_OBJECT_CLASS(desk_answer_parent_class)->finalize(object);
}

static void desk_answer_class_init(DeskAnswerClass* class) {
  G_OBJECT_CLASS(class)->finalize = desk_answer_finalize;
  changed = g_signal_new("changed", DESK_TYPE_ANSWER, G_SIGNAL_RUN_LAST, 0, NULL, NULL, NULL,
                         G_TYPE_NONE, 0);
}

static void desk_answer_init(DeskAnswer* self) { self->text = g_string_new(NULL); }

DeskAnswer* desk_answer_new(const char* question) {
  DeskAnswer* self = g_object_new(DESK_TYPE_ANSWER, NULL);
  self->question = g_strdup(question);
  return self;
}

void desk_answer_changed(DeskAnswer* answer) { g_signal_emit(answer, changed, 0); }
