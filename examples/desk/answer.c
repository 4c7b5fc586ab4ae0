#include "answer.h"

#include "worker.h"

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

typedef struct Part {
  DeskAnswer* answer;
  char* text;
} Part;

static void show_part(gpointer pointer) {
  Part* part = pointer;
  part->answer->state = DESK_ANSWER_COMING;
  g_string_append(part->answer->text, part->text);
  desk_answer_changed(part->answer);
  g_object_unref(part->answer);
  g_free(part->text);
  g_free(part);
}

int32_t desk_answer_on_text(const char* text, size_t size, void* answer) {
  Part* part = g_new(Part, 1);
  *part = (Part){g_object_ref(answer), g_utf8_make_valid(text, (gssize)size)};
  desk_worker_post(show_part, part);
  return 0;
}
