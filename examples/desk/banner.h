/* A message with up to two actions, at the top of a page: the one way to show an error. */
#ifndef DESK_BANNER_H
#define DESK_BANNER_H

#include <adwaita.h>

#define DESK_TYPE_BANNER (desk_banner_get_type())
G_DECLARE_FINAL_TYPE(DeskBanner, desk_banner, DESK, BANNER, AdwBin)

enum { DESK_BANNER_DISMISSED, DESK_BANNER_FIRST, DESK_BANNER_SECOND };

/* Shows a message; NULL hides the banner. A NULL action has no button. Signal "response" with a
 * number of the enum. */
void desk_banner_show(DeskBanner* banner, const char* message, const char* first,
                      const char* second);

#endif
