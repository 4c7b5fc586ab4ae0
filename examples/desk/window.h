/* The window: the library at its side, and the document that is chosen there. */
#ifndef DESK_WINDOW_H
#define DESK_WINDOW_H

#include <adwaita.h>

#define DESK_TYPE_WINDOW (desk_window_get_type())
G_DECLARE_FINAL_TYPE(DeskWindow, desk_window, DESK, WINDOW, AdwApplicationWindow)

/* model_path NULL: the window asks for one. */
DeskWindow* desk_window_new(GtkApplication* application, const char* model_path);

/* Takes documents in and shows them, as soon as there is a model. */
void desk_window_open_files(DeskWindow* window, GFile** files, int count);
/* Asks for documents. */
void desk_window_choose_files(DeskWindow* window);

#endif
