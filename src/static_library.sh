#!/bin/sh
# The static product: static_library.sh COMPILER... -- OBJCOPY AR OUTPUT ARCHIVE... All objects are
# linked into one whose only global symbols are kv_*, so that nothing inside collides with a host's
# own copy of anything. COMDAT groups are resolved first: a localised symbol must not stay the key
# of a group that another object may replace.
set -eu
compiler=
while [ "$1" != -- ]; do
  compiler="$compiler $1"
  shift
done
objcopy=$2 ar=$3 output=$4
shift 4

object="$output.o"
# shellcheck disable=SC2086 # a compiler may be several words, such as ccache and c++
$compiler -r -nostdlib -Wl,--force-group-allocation -Wl,--whole-archive -o "$object" "$@"
"$objcopy" --wildcard --keep-global-symbol='kv_*' "$object"
rm -f "$output"
"$ar" rcsD "$output" "$object"
rm "$object"
