#include "all.h"

#include "collection.h"
#include "exchange.h"
#include "words.h"
#include "worker.h"

struct _DeskAll {
  AdwBin parent;
  DeskLibrary* library;
  DeskWorker* worker; /* NULL: closed */
  GQueue asked;       /* Question; the head is running or begins next */
  GtkStack* talk;
  GtkScrolledWindow* scroller;
  GtkBox* exchanges;
  GtkEntry* entry;
  GtkWidget *ask, *stop;
};

G_DEFINE_TYPE(DeskAll, desk_all, ADW_TYPE_BIN)

enum { CHANGED, SHOW_SOURCE, SIGNALS };
static guint signals[SIGNALS];

/* ---- the thread ------------------------------------------------------------------------------ */

typedef struct Question {
  DeskAll* self;
  DeskLibrary* library; /* whose shelf and model the thread uses */
  DeskAnswer* answer;
  char* question;
  kv_cancel* cancel;
  kv_status status;
  kv_error error;
  DeskOutcome outcome;
} Question;

static void answer_work(gpointer pointer) {
  Question* q = pointer;
  const DeskAsking asking = {q->question, q->cancel, desk_answer_on_text, q->answer};
  q->status = desk_collection_ask(desk_library_shelf(q->library), desk_library_model(q->library),
                                  &asking, &q->outcome, &q->error);
}

static void show(DeskAll* self);

static void answer_done(gpointer pointer) {
  Question* q = pointer;
  DeskAnswer* answer = q->answer;
  answer->state = q->status == KV_OK          ? DESK_ANSWER_WHOLE
                  : q->status == KV_CANCELLED ? DESK_ANSWER_STOPPED
                                              : DESK_ANSWER_FAILED;
  if (answer->state == DESK_ANSWER_FAILED)
    answer->failure = q->status == KV_NOT_FOUND ? g_strdup("No document has been prefilled yet.")
                                                : desk_failure(q->status, q->error.message);
  answer->outcome = q->outcome;
  desk_answer_changed(answer);
  g_queue_remove(&q->self->asked, q);
  show(q->self);
  kv_cancel_release(q->cancel);
  g_object_unref(answer);
  g_object_unref(q->library);
  g_object_unref(q->self);
  g_free(q->question);
  g_free(q);
}

/* ---- the page -------------------------------------------------------------------------------- */

static void show(DeskAll* self) {
  const gboolean busy = desk_all_is_busy(self);
  gtk_widget_set_visible(self->stop, busy);
  gtk_widget_set_visible(self->ask, !busy);
  gtk_widget_set_sensitive(self->ask, gtk_entry_get_text_length(self->entry) > 0);
  g_signal_emit(self, signals[CHANGED], 0);
}

static void show_passage(DeskExchange* exchange, guint number, gpointer self) {
  g_signal_emit(self, signals[SHOW_SOURCE], 0,
                g_ptr_array_index(desk_exchange_answer(exchange)->outcome.passages, number));
}

static void ask_clicked(DeskAll* self) {
  g_autofree char* text = g_strstrip(g_strdup(gtk_editable_get_text(GTK_EDITABLE(self->entry))));
  if (!*text || !self->worker || !desk_library_model(self->library)) return;
  Question* q = g_new0(Question, 1);
  if (kv_cancel_create(&q->cancel, NULL) != KV_OK) {
    g_free(q);
    return;
  }
  q->self = g_object_ref(self);
  q->library = g_object_ref(self->library);
  q->answer = desk_answer_new(text);
  q->question = g_steal_pointer(&text);
  GtkWidget* exchange = desk_exchange_new(q->answer);
  g_signal_connect_object(exchange, "show-passage", G_CALLBACK(show_passage), self, 0);
  gtk_box_append(self->exchanges, exchange);
  gtk_stack_set_visible_child_name(self->talk, "talk");
  gtk_editable_set_text(GTK_EDITABLE(self->entry), "");
  g_queue_push_tail(&self->asked, q);
  desk_worker_push(self->worker, answer_work, answer_done, q);
  show(self);
}

static void entry_changed(DeskAll* self) { show(self); }

static gboolean to_end(gpointer pointer) {
  GtkAdjustment* place = gtk_scrolled_window_get_vadjustment(DESK_ALL(pointer)->scroller);
  gtk_adjustment_set_value(place, gtk_adjustment_get_upper(place));
  return G_SOURCE_REMOVE;
}

/* Scrolls to the end of a longer conversation after the layout. */
static void grew(DeskAll* self) {
  g_idle_add_full(G_PRIORITY_DEFAULT_IDLE, to_end, g_object_ref(self), g_object_unref);
}

gboolean desk_all_is_busy(DeskAll* self) { return !g_queue_is_empty(&self->asked); }

void desk_all_stop(DeskAll* self) {
  Question* running = g_queue_peek_head(&self->asked);
  if (running) kv_cancel_fire(running->cancel);
}

void desk_all_close(DeskAll* self) {
  for (GList* asked = self->asked.head; asked; asked = asked->next)
    kv_cancel_fire(((Question*)asked->data)->cancel);
  g_clear_pointer(&self->worker, desk_worker_free);
}

void desk_all_focus_entry(DeskAll* self) { gtk_widget_grab_focus(GTK_WIDGET(self->entry)); }

/* ---- the widget ------------------------------------------------------------------------------ */

static void desk_all_dispose(GObject* object) {
  DeskAll* self = DESK_ALL(object);
  desk_all_close(self);
  g_clear_object(&self->library);
  G_OBJECT_CLASS(desk_all_parent_class)->dispose(object);
}

static void desk_all_class_init(DeskAllClass* class) {
  GtkWidgetClass* widget = GTK_WIDGET_CLASS(class);
  G_OBJECT_CLASS(class)->dispose = desk_all_dispose;
  signals[CHANGED] = g_signal_new("changed", DESK_TYPE_ALL, G_SIGNAL_RUN_LAST, 0, NULL, NULL, NULL,
                                  G_TYPE_NONE, 0);
  signals[SHOW_SOURCE] = g_signal_new("show-source", DESK_TYPE_ALL, G_SIGNAL_RUN_LAST, 0, NULL,
                                      NULL, NULL, G_TYPE_NONE, 1, G_TYPE_POINTER);
  gtk_widget_class_set_template_from_resource(widget, "/org/kvasir/Desk/all.ui");
  gtk_widget_class_bind_template_child(widget, DeskAll, talk);
  gtk_widget_class_bind_template_child(widget, DeskAll, scroller);
  gtk_widget_class_bind_template_child(widget, DeskAll, exchanges);
  gtk_widget_class_bind_template_child(widget, DeskAll, entry);
  gtk_widget_class_bind_template_child(widget, DeskAll, ask);
  gtk_widget_class_bind_template_child(widget, DeskAll, stop);
  gtk_widget_class_bind_template_callback(widget, ask_clicked);
  gtk_widget_class_bind_template_callback(widget, entry_changed);
}

static void desk_all_init(DeskAll* self) {
  g_queue_init(&self->asked);
  self->worker = desk_worker_new();
  gtk_widget_init_template(GTK_WIDGET(self));
}

GtkWidget* desk_all_new(DeskLibrary* library) {
  DeskAll* self = g_object_new(DESK_TYPE_ALL, NULL);
  self->library = g_object_ref(library);
  g_signal_connect_object(gtk_scrolled_window_get_vadjustment(self->scroller), "notify::upper",
                          G_CALLBACK(grew), self, G_CONNECT_SWAPPED);
  show(self);
  return GTK_WIDGET(self);
}
