#include "banner.h"

struct _DeskBanner {
  AdwBin parent;
  GtkRevealer* revealer;
  GtkLabel* message;
  GtkWidget* actions;
  GtkButton *first, *second;
};

G_DEFINE_TYPE(DeskBanner, desk_banner, ADW_TYPE_BIN)

static guint response;

static void first_clicked(DeskBanner* self) {
  g_signal_emit(self, response, 0, (guint)DESK_BANNER_FIRST);
}

static void second_clicked(DeskBanner* self) {
  g_signal_emit(self, response, 0, (guint)DESK_BANNER_SECOND);
}

static void dismiss_clicked(DeskBanner* self) {
  g_signal_emit(self, response, 0, (guint)DESK_BANNER_DISMISSED);
}

static void desk_banner_class_init(DeskBannerClass* class) {
  GtkWidgetClass* widget = GTK_WIDGET_CLASS(class);
  response = g_signal_new("response", DESK_TYPE_BANNER, G_SIGNAL_RUN_LAST, 0, NULL, NULL, NULL,
                          G_TYPE_NONE, 1, G_TYPE_UINT);
  gtk_widget_class_set_template_from_resource(widget, "/org/kvasir/Desk/banner.ui");
  gtk_widget_class_bind_template_child(widget, DeskBanner, revealer);
  gtk_widget_class_bind_template_child(widget, DeskBanner, message);
  gtk_widget_class_bind_template_child(widget, DeskBanner, actions);
  gtk_widget_class_bind_template_child(widget, DeskBanner, first);
  gtk_widget_class_bind_template_child(widget, DeskBanner, second);
  gtk_widget_class_bind_template_callback(widget, first_clicked);
  gtk_widget_class_bind_template_callback(widget, second_clicked);
  gtk_widget_class_bind_template_callback(widget, dismiss_clicked);
}

static void desk_banner_init(DeskBanner* self) { gtk_widget_init_template(GTK_WIDGET(self)); }

static void show_action(GtkButton* button, const char* label) {
  gtk_widget_set_visible(GTK_WIDGET(button), label != NULL);
  if (label) gtk_button_set_label(button, label);
}

void desk_banner_show(DeskBanner* self, const char* message, const char* first,
                      const char* second) {
  gtk_revealer_set_reveal_child(self->revealer, message != NULL);
  if (!message) return;
  gtk_label_set_label(self->message, message);
  show_action(self->first, first);
  show_action(self->second, second);
  gtk_widget_set_visible(self->actions, first || second);
}
