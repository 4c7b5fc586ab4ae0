/* A document in the side bar. */
#ifndef DESK_ROW_H
#define DESK_ROW_H

#include <gtk/gtk.h>

#include "document.h"

#define DESK_TYPE_ROW (desk_row_get_type())
G_DECLARE_FINAL_TYPE(DeskRow, desk_row, DESK, ROW, GtkListBoxRow)

/* The menu activates the window's actions "rename" and "remove" with the document's name. */
GtkWidget* desk_row_new(DeskDocument* document);
DeskDocument* desk_row_document(DeskRow* row);

#endif
