#include "row.h"

struct _DeskRow {
  GtkListBoxRow parent;
  DeskDocument* document;
  GtkLabel *name, *summary;
  GtkProgressBar* progress;
  GtkMenuButton* menu;
};

G_DEFINE_TYPE(DeskRow, desk_row, GTK_TYPE_LIST_BOX_ROW)

static void show(DeskRow* self) {
  const DeskState state = desk_document_state(self->document);
  const char* name = desk_document_name(self->document);
  g_autofree char *summary = desk_document_summary(self->document),
                  *label = g_strdup_printf("%s, %s", name, summary);
  gtk_label_set_label(self->name, name);
  gtk_label_set_label(self->summary, summary);
  gtk_widget_set_visible(GTK_WIDGET(self->progress), state == DESK_PREFILLING);
  gtk_progress_bar_set_fraction(self->progress, desk_document_progress_part(self->document));
  gtk_widget_set_tooltip_text(GTK_WIDGET(self->name), name);
  gtk_widget_action_set_enabled(GTK_WIDGET(self), "row.rename",
                                !desk_document_is_busy(self->document));
  gtk_accessible_update_property(GTK_ACCESSIBLE(self), GTK_ACCESSIBLE_PROPERTY_LABEL, label, -1);
}

static void activate(GtkWidget* widget, const char* action, GVariant* unused) {
  const char* to = g_str_equal(action, "row.rename") ? "win.rename" : "win.remove";
  (void)unused;
  gtk_widget_activate_action(widget, to, "s", desk_document_name(DESK_ROW(widget)->document));
}

static void desk_row_dispose(GObject* object) {
  g_clear_object(&DESK_ROW(object)->document);
  G_OBJECT_CLASS(desk_row_parent_class)->dispose(object);
}

static void desk_row_class_init(DeskRowClass* class) {
  GtkWidgetClass* widget = GTK_WIDGET_CLASS(class);
  G_OBJECT_CLASS(class)->dispose = desk_row_dispose;
  gtk_widget_class_set_template_from_resource(widget, "/org/kvasir/Desk/row.ui");
  gtk_widget_class_bind_template_child(widget, DeskRow, name);
  gtk_widget_class_bind_template_child(widget, DeskRow, summary);
  gtk_widget_class_bind_template_child(widget, DeskRow, progress);
  gtk_widget_class_bind_template_child(widget, DeskRow, menu);
  gtk_widget_class_install_action(widget, "row.rename", NULL, activate);
  gtk_widget_class_install_action(widget, "row.remove", NULL, activate);
}

static void desk_row_init(DeskRow* self) { gtk_widget_init_template(GTK_WIDGET(self)); }

GtkWidget* desk_row_new(DeskDocument* document) {
  DeskRow* self = g_object_new(DESK_TYPE_ROW, NULL);
  self->document = g_object_ref(document);
  g_signal_connect_object(document, "changed", G_CALLBACK(show), self, G_CONNECT_SWAPPED);
  show(self);
  return GTK_WIDGET(self);
}

DeskDocument* desk_row_document(DeskRow* row) { return row->document; }
