/* The program: options, shortcuts, one window. */
#ifndef DESK_APPLICATION_H
#define DESK_APPLICATION_H

#include <adwaita.h>

#define DESK_TYPE_APPLICATION (desk_application_get_type())
G_DECLARE_FINAL_TYPE(DeskApplication, desk_application, DESK, APPLICATION, AdwApplication)

DeskApplication* desk_application_new(void);

#endif
