#include "eval_values.h"

#include <array>

namespace tool {
namespace {

constexpr std::array attribute_kinds = {
    "access",    "serial",      "opening",  "registration", "storage",  "inspection",
    "catalogue", "maintenance", "delivery", "file",         "tracking", "radio",
    "locker",    "closing",     "account",  "display",      "shelf",    "permit",
    "security",  "backup",      "entry",    "service",      "archive",  "transit"};
constexpr std::array attribute_nouns = {"code", "number", "date", "reference", "location",
                                        "mark", "phrase", "name", "sign",      "label"};

constexpr std::array entity_kinds = {"north", "south",  "blue",     "copper",    "old",    "river",
                                     "glass", "winter", "signal",   "east",      "silver", "stone",
                                     "night", "city",   "white",    "market",    "iron",   "marble",
                                     "green", "harbor", "mountain", "botanical", "golden", "upper"};
constexpr std::array entity_nouns = {"gate",       "office",  "kettle",    "library",    "station",
                                     "lighthouse", "ferry",   "pavilion",  "garden",     "tower",
                                     "bridge",     "compass", "warehouse", "mill",       "express",
                                     "museum",     "balloon", "lantern",   "depot",      "fountain",
                                     "workshop",   "quarry",  "hall",      "observatory"};

constexpr std::array fact_words = {
    "amber",   "anchor", "apron",   "arrow",   "aspen",   "badger",  "bamboo",  "banner",
    "barrel",  "basil",  "basket",  "beacon",  "beaver",  "birch",   "bishop",  "bonnet",
    "bramble", "bronze", "bucket",  "butter",  "cactus",  "candle",  "canyon",  "carpet",
    "cedar",   "cherry", "chisel",  "cinder",  "clover",  "cobalt",  "comet",   "copper",
    "coral",   "cotton", "crystal", "curtain", "cymbal",  "daisy",   "dagger",  "desert",
    "dolphin", "drum",   "ember",   "falcon",  "feather", "fern",    "fiddle",  "flannel",
    "forest",  "fossil", "garnet",  "ginger",  "glacier", "granite", "hammer",  "harvest",
    "hazel",   "heron",  "honey",   "indigo",  "island",  "ivory",   "jasmine", "juniper",
    "kernel",  "kettle", "ladder",  "lagoon",  "lantern", "lemon",   "linen",   "magnet",
    "maple",   "marble", "meadow",  "mirror",  "mitten",  "monsoon", "mustard", "nectar",
    "needle",  "nickel", "olive",   "onyx",    "orchid",  "otter",   "paddle",  "paper",
    "parrot",  "pebble", "pepper",  "pigeon",  "pillar",  "pillow",  "plaster", "pumpkin",
    "quartz",  "quiver", "raven",   "ribbon",  "rocket",  "saddle",  "saffron", "salmon",
    "sandal",  "saucer", "shovel",  "silver",  "sparrow", "spruce",  "table",   "thistle",
    "thunder", "timber", "topaz",   "tulip",   "tunnel",  "turnip",  "velvet",  "walnut",
    "willow",  "window", "zephyr"};
static_assert(fact_words.size() * (fact_words.size() - 1) > two_word_pairs);

constexpr std::array months = {"January",   "February", "March",    "April",
                               "May",       "June",     "July",     "August",
                               "September", "October",  "November", "December"};

std::string digits(Random* random, size_t min, size_t max) {
  return std::to_string(random->between(min, max));
}

}  // namespace

std::string any_number(Random* random) { return digits(random, 1'000'000, 9'999'999); }

std::string any_code(Random* random) {
  constexpr std::string_view letters = "ABCDEFGHJKLMNPRSTUVWXYZ";
  std::string code = {random->pick(letters), random->pick(letters), '-'};
  return code + digits(random, 1000, 9999);
}

std::string any_date(Random* random) {
  std::string date = digits(random, 1, 28) + " ";
  date += random->pick(months);
  return date + " " + digits(random, 1850, 1999);
}

std::string any_two_words(Random* random) {
  const std::vector<size_t> two = random->sample(fact_words.size(), 2);
  return std::string(fact_words[two[0]]) + " " + fact_words[two[1]];
}

std::string any_uuid(Random* random) {
  std::string id = hex(random->bits());
  id += hex(random->bits());
  id[12] = '4';  // version 4, variant 1
  id[16] = "89ab"[random->below(4)];
  for (const size_t at : {20u, 16u, 12u, 8u}) id.insert(at, 1, '-');
  return id;
}

std::string any_attribute(Random* random) {
  const char* kind = random->pick(attribute_kinds);
  return std::string(kind) + " " + random->pick(attribute_nouns);
}

std::string any_entity(Random* random) {
  const char* kind = random->pick(entity_kinds);
  return std::string(kind) + " " + random->pick(entity_nouns);
}

std::string value_for(const std::string& attribute, Random* random) {
  if (attribute.ends_with(" date")) return any_date(random);
  switch (random->below(3)) {
    case 0:
      return any_number(random);
    case 1:
      return any_code(random);
    default:
      return any_two_words(random);
  }
}

std::string any_word(Random* random) { return random->pick(fact_words); }

}  // namespace tool
