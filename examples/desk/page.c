#include "page.h"

#include "banner.h"
#include "exchange.h"
#include "words.h"

struct _DeskPage {
  AdwBin parent;
  DeskDocument* document;
  DeskBanner* banner;
  GtkRevealer* strip;
  GtkLabel* strip_text;
  GtkWidget *strip_stop, *strip_resume, *ask, *stop;
  AdwFlap* flap;
  GtkStack* talk;
  AdwStatusPage* empty;
  GtkScrolledWindow* scroller;
  GtkBox* exchanges;
  GtkProgressBar* strip_progress;
  GtkEntry* entry;
  GtkTextView* text;
  GtkTextTag* shown_passage;
  GBytes* text_shown;
  gsize begin, end; /* of a passage to show when there is a text; equal: none */
};

G_DEFINE_TYPE(DeskPage, desk_page, ADW_TYPE_BIN)

/* ---- the document's text --------------------------------------------------------------------- */

static void mark_passage(DeskPage* self, gsize from_byte, gsize to_byte);

static void fill_text(DeskPage* self) {
  GBytes* text = desk_document_text(self->document);
  if (!text || text == self->text_shown) return;
  gsize size = 0;
  const char* data = g_bytes_get_data(text, &size);
  /* A new buffer: GTK 4.8 fails on replaced text with an accessibility bus. */
  g_autoptr(GtkTextBuffer) buffer = gtk_text_buffer_new(NULL);
  gtk_text_buffer_set_text(buffer, data, (int)size);
  self->shown_passage = gtk_text_buffer_create_tag(buffer, NULL, "background", "#f8e45c",
                                                   "foreground", "#241f31", NULL);
  gtk_text_view_set_buffer(self->text, buffer);
  g_clear_pointer(&self->text_shown, g_bytes_unref);
  self->text_shown = g_bytes_ref(text);
  if (self->begin < self->end) mark_passage(self, self->begin, self->end);
  self->begin = self->end = 0;
}

static void mark_passage(DeskPage* self, gsize from_byte, gsize to_byte) {
  GtkTextBuffer* buffer = gtk_text_view_get_buffer(self->text);
  gsize size = 0;
  const char* data = g_bytes_get_data(self->text_shown, &size);
  if (to_byte > size) return; /* of another text */
  GtkTextIter from, to, begin, end;
  if (!adw_flap_get_reveal_flap(self->flap))
    gtk_widget_activate_action(GTK_WIDGET(self), "win.show-text", NULL);
  gtk_text_buffer_get_bounds(buffer, &from, &to);
  gtk_text_buffer_remove_tag(buffer, self->shown_passage, &from, &to);
  gtk_text_buffer_get_iter_at_offset(buffer, &begin,
                                     (int)g_utf8_pointer_to_offset(data, data + from_byte));
  gtk_text_buffer_get_iter_at_offset(buffer, &end,
                                     (int)g_utf8_pointer_to_offset(data, data + to_byte));
  gtk_text_buffer_apply_tag(buffer, self->shown_passage, &begin, &end);
  gtk_text_buffer_place_cursor(buffer, &begin);
  gtk_text_view_scroll_to_mark(self->text, gtk_text_buffer_get_insert(buffer), 0, TRUE, 0, 0.3);
}

void desk_page_show_passage(DeskPage* self, const DeskPassage* passage) {
  if (self->text_shown) mark_passage(self, passage->begin, passage->end);
  else self->begin = passage->begin, self->end = passage->end;
}

static void show_passage(DeskExchange* exchange, guint number, gpointer self) {
  desk_page_show_passage(
      self, g_ptr_array_index(desk_exchange_answer(exchange)->outcome.passages, number));
}

/* ---- state ----------------------------------------------------------------------------------- */

static void show_strip(DeskPage* self, DeskState state) {
  const gboolean works = state == DESK_PREFILLING || state == DESK_SAVING || state == DESK_OPENING;
  const gboolean part = state == DESK_READY && !desk_document_is_complete(self->document);
  if (works) {
    g_autofree char* summary = desk_document_summary(self->document);
    gtk_label_set_label(self->strip_text, summary);
    gtk_progress_bar_set_fraction(
        self->strip_progress,
        state == DESK_SAVING ? 1 : desk_document_progress_part(self->document));
  } else if (part) {
    const double share = desk_document_part(self->document);
    g_autofree char *percent = desk_percent(share),
                    *text = g_strdup_printf("%s prefilled: answers know only that part", percent);
    gtk_label_set_label(self->strip_text, text);
    gtk_progress_bar_set_fraction(self->strip_progress, share);
  }
  gtk_widget_set_visible(self->strip_stop, works);
  gtk_widget_set_sensitive(self->strip_stop, state == DESK_PREFILLING);
  gtk_widget_set_visible(self->strip_resume, part || (state == DESK_CLOSED && self->text_shown));
  if (state == DESK_CLOSED && self->text_shown) {
    gtk_label_set_label(self->strip_text, "Not prefilled yet");
    gtk_progress_bar_set_fraction(self->strip_progress, 0);
  }
  gtk_revealer_set_reveal_child(self->strip,
                                works || part || (state == DESK_CLOSED && self->text_shown));
}

static void show_empty(DeskPage* self, DeskState state) {
  adw_status_page_set_title(self->empty, desk_document_name(self->document));
  if (state == DESK_PREFILLING || state == DESK_SAVING) {
    adw_status_page_set_description(self->empty,
                                    "The model prefills the document once. A question waits until "
                                    "then.");
  } else if (state == DESK_READY || state == DESK_ANSWERING) {
    g_autofree char* length = desk_document_length(self->document);
    g_autofree char* text = desk_document_is_complete(self->document)
                                ? g_strdup_printf("Ready: %s. Ask about it.", length)
                                : g_strdup("Ready. Ask about the prefilled part.");
    adw_status_page_set_description(self->empty, text);
  } else {
    adw_status_page_set_description(self->empty, NULL);
  }
}

static void show_notice(DeskPage* self, DeskState state) {
  const DeskRemedy remedy = desk_document_remedy(self->document);
  const gboolean again = remedy == DESK_REMEDY_TRY_AGAIN && state == DESK_FAILED;
  const gboolean shorten = remedy == DESK_REMEDY_SHORTEN;
  desk_banner_show(self->banner, desk_document_notice(self->document),
                   shorten ? "_Use the First Part"
                   : again ? "_Try Again"
                           : NULL,
                   shorten ? "_Remove" : NULL);
}

/* Shows the document's answers: all again where loaded ones come before those shown. */
static void show_answers(DeskPage* self) {
  GPtrArray* answers = desk_document_answers(self->document);
  GtkWidget* child = gtk_widget_get_first_child(GTK_WIDGET(self->exchanges));
  guint count = 0;
  for (; child && count < answers->len; child = gtk_widget_get_next_sibling(child), ++count)
    if (desk_exchange_answer(DESK_EXCHANGE(child)) != answers->pdata[count]) break;
  while (child) {
    GtkWidget* next = gtk_widget_get_next_sibling(child);
    gtk_box_remove(self->exchanges, child);
    child = next;
  }
  for (; count < answers->len; ++count) {
    GtkWidget* exchange = desk_exchange_new(answers->pdata[count]);
    g_signal_connect_object(exchange, "show-passage", G_CALLBACK(show_passage), self, 0);
    gtk_box_append(self->exchanges, exchange);
  }
  if (answers->len > 0) gtk_stack_set_visible_child_name(self->talk, "talk");
}

static void show(DeskPage* self) {
  const DeskState state = desk_document_state(self->document);
  fill_text(self);
  show_answers(self);
  show_notice(self, state);
  gtk_widget_set_visible(self->stop, state == DESK_ANSWERING);
  gtk_widget_set_visible(self->ask, state != DESK_ANSWERING);
  gtk_widget_set_sensitive(self->ask, gtk_entry_get_text_length(self->entry) > 0 &&
                                          state != DESK_FAILED && state != DESK_CLOSED);
  show_strip(self, state);
  show_empty(self, state);
}

/* ---- actions of the user --------------------------------------------------------------------- */

static gboolean to_end(gpointer pointer) {
  DeskPage* self = pointer;
  GtkAdjustment* place = gtk_scrolled_window_get_vadjustment(self->scroller);
  gtk_adjustment_set_value(place, gtk_adjustment_get_upper(place));
  return G_SOURCE_REMOVE;
}

static void ask_clicked(DeskPage* self) {
  g_autofree char* question =
      g_strstrip(g_strdup(gtk_editable_get_text(GTK_EDITABLE(self->entry))));
  const DeskState state = desk_document_state(self->document);
  if (!*question || state == DESK_FAILED || state == DESK_CLOSED) return;
  g_autoptr(DeskAnswer) answer = desk_answer_new(question);
  gtk_editable_set_text(GTK_EDITABLE(self->entry), "");
  desk_document_ask(self->document, answer);
}

static void entry_changed(DeskPage* self) { show(self); }
static void resume_clicked(DeskPage* self) { desk_document_resume(self->document); }

static void banner_response(DeskBanner* banner, guint response, gpointer pointer) {
  DeskPage* self = pointer;
  const char* name = desk_document_name(self->document);
  (void)banner;
  if (response == DESK_BANNER_DISMISSED) desk_document_dismiss(self->document);
  else if (desk_document_remedy(self->document) == DESK_REMEDY_TRY_AGAIN)
    gtk_widget_activate_action(GTK_WIDGET(self), "win.open-document", "s", name);
  else if (response == DESK_BANNER_FIRST) desk_document_shorten(self->document);
  else gtk_widget_activate_action(GTK_WIDGET(self), "win.remove", "s", name);
}

/* Scrolls to the end of a longer conversation after the layout. */
static void grew(DeskPage* self) {
  g_idle_add_full(G_PRIORITY_DEFAULT_IDLE, to_end, g_object_ref(self), g_object_unref);
}

/* ---- the widget ------------------------------------------------------------------------------ */

static void desk_page_dispose(GObject* object) {
  g_clear_object(&DESK_PAGE(object)->document);
  g_clear_pointer(&DESK_PAGE(object)->text_shown, g_bytes_unref);
  G_OBJECT_CLASS(desk_page_parent_class)->dispose(object);
}

static void desk_page_class_init(DeskPageClass* class) {
  GtkWidgetClass* widget = GTK_WIDGET_CLASS(class);
  G_OBJECT_CLASS(class)->dispose = desk_page_dispose;
  gtk_widget_class_set_template_from_resource(widget, "/org/kvasir/Desk/page.ui");
  gtk_widget_class_bind_template_child(widget, DeskPage, banner);
  gtk_widget_class_bind_template_child(widget, DeskPage, strip);
  gtk_widget_class_bind_template_child(widget, DeskPage, strip_text);
  gtk_widget_class_bind_template_child(widget, DeskPage, strip_stop);
  gtk_widget_class_bind_template_child(widget, DeskPage, strip_resume);
  gtk_widget_class_bind_template_child(widget, DeskPage, ask);
  gtk_widget_class_bind_template_child(widget, DeskPage, stop);
  gtk_widget_class_bind_template_child(widget, DeskPage, flap);
  gtk_widget_class_bind_template_child(widget, DeskPage, talk);
  gtk_widget_class_bind_template_child(widget, DeskPage, empty);
  gtk_widget_class_bind_template_child(widget, DeskPage, scroller);
  gtk_widget_class_bind_template_child(widget, DeskPage, exchanges);
  gtk_widget_class_bind_template_child(widget, DeskPage, strip_progress);
  gtk_widget_class_bind_template_child(widget, DeskPage, entry);
  gtk_widget_class_bind_template_child(widget, DeskPage, text);
  gtk_widget_class_bind_template_callback(widget, ask_clicked);
  gtk_widget_class_bind_template_callback(widget, entry_changed);
  gtk_widget_class_bind_template_callback(widget, resume_clicked);
  gtk_widget_class_bind_template_callback(widget, banner_response);
}

static void desk_page_init(DeskPage* self) {
  g_type_ensure(DESK_TYPE_BANNER);
  gtk_widget_init_template(GTK_WIDGET(self));
}

GtkWidget* desk_page_new(DeskDocument* document) {
  DeskPage* self = g_object_new(DESK_TYPE_PAGE, NULL);
  self->document = g_object_ref(document);
  g_signal_connect_object(document, "changed", G_CALLBACK(show), self, G_CONNECT_SWAPPED);
  g_signal_connect_object(gtk_scrolled_window_get_vadjustment(self->scroller), "notify::upper",
                          G_CALLBACK(grew), self, G_CONNECT_SWAPPED);
  show(self);
  return GTK_WIDGET(self);
}

DeskDocument* desk_page_document(DeskPage* page) { return page->document; }
void desk_page_show_text(DeskPage* page, gboolean shown) {
  adw_flap_set_reveal_flap(page->flap, shown);
}
AdwFlap* desk_page_flap(DeskPage* page) { return page->flap; }
void desk_page_focus_entry(DeskPage* page) { gtk_widget_grab_focus(GTK_WIDGET(page->entry)); }
