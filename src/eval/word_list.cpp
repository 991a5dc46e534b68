// Written for this program, under its licence. No word is part of another one, so that a model that
// answers with one word is not credited with a second one that stands within it.
#include "eval/word_list.h"

#include <algorithm>
#include <string_view>

namespace sbtrain {
namespace {

constexpr std::string_view kAdjectives =
    "ample ancient angry arctic avid awkward balanced bashful bitter blazing bleak blissful blunt "
    "boastful bouncy brave breezy brief bright brisk bronze bumpy busy calm candid careful casual "
    "cautious cheap cheerful chilly chubby clever cloudy clumsy coastal cobalt colossal compact "
    "copper cosmic cozy crafty cranky crimson crisp cruel curious curly cynical dainty damp "
    "daring dazzling decent deep delicate dense devoted diligent dizzy drafty dreamy dull dusty "
    "eager early earnest elastic elderly elegant eminent empty endless enormous epic exact exotic "
    "faded faint fancy fearless feisty fickle fiery flaky flashy flimsy fluffy foggy fond formal "
    "fragile frail frank frosty frugal funny fuzzy gallant gaunt gentle giant giddy glad gleaming "
    "gloomy glossy golden graceful gracious grand grateful greasy greedy grim grumpy guilty "
    "handsome handy happy harsh hasty hazy hearty heavy hefty helpful hidden hollow honest humble "
    "humid hungry husky idle immense innocent ivory jagged jaunty jealous jolly joyful juicy "
    "jumbo keen kind lanky lavish lazy lean legal lively lonely loyal lucid lunar lush magnetic "
    "majestic marble massive mellow merry mighty mild misty modern modest moist mossy muddy muted "
    "mystic naive narrow nasty neat nervous nimble noble noisy nutty oblong obscure odd olive "
    "opaque orange ornate oval pale patient peaceful perky petite placid playful pleasant plucky "
    "plump polished polite precious prickly proud prudent puny purple puzzled quaint quick quiet "
    "quirky radiant ragged rapid rare raspy ready regal rigid ripe rocky rosy rough royal ruby "
    "rugged rural rustic sacred salty sandy scarce scarlet secret serene shabby shaggy shallow "
    "sharp shiny shrill silent silky silver simple skinny sleek sleepy slender slick slim smoky "
    "smooth snappy snowy sober soft solar solemn solid somber sour spare sparse spicy spiral spry "
    "stark steady steep sticky stormy stout strange sturdy subtle sudden sulky sunny superb swift "
    "tame tangy tasty tender tense thirsty thorny thrifty tidy timid tiny tranquil trendy tricky "
    "tropical trusty turquoise ugly unique upbeat urban urgent vague vast velvet verbal vibrant "
    "violet vital vivid wacky warm wary watery weary weird whimsical wicked wild windy wise witty "
    "wobbly wooden worthy wry yellow young youthful zany zealous zesty";

constexpr std::string_view kNouns =
    "acorn admiral airport alcove almond anchor ankle anthem antler anvil apple apricot apron "
    "arcade archer arena armor artist atlas attic auction autumn avenue badge bagel bakery "
    "balcony balloon bamboo banana bandit banjo banner barley barrel basin basket beacon beaver "
    "beetle bicycle biscuit blanket blender blizzard blossom bonfire bonnet border bottle boulder "
    "bouquet bracelet bramble branch brandy breeze brewery bridge broccoli brook broom bucket "
    "buffalo bugle bundle bunker burrow butler butter button cabbage cabin cactus camel camera "
    "canal candle canoe canvas canyon captain caravan carbon cargo carpet carrot castle cavern "
    "cedar cellar cello cement chalk chamber chapel charcoal cherry chimney chisel cider cinema "
    "circus citadel clam clarinet cliff clinic cloak clover cobbler cobra coconut coffee collar "
    "comet compass concert condor cookie coral corridor cottage cotton cougar county courtyard "
    "coyote cradle crater crayon cricket crocus cruiser crystal cupboard curtain cushion cyclone "
    "cymbal cypress daisy dancer delta desert diamond dinner doctor dolphin domino donkey doorway "
    "dragon drawer drizzle drummer duchess dungeon eagle eclipse elbow elephant elevator embassy "
    "emerald engine envelope estuary falcon farmer feather fender fennel fern ferry fiddle finch "
    "firefly flamingo flannel flask flute forest fossil fountain foxglove freezer frigate furnace "
    "gadget galaxy gallery garden garlic gazelle geyser ginger giraffe glacier goblet gondola "
    "gopher gorilla gourd granite grape gravel griddle guitar gutter habitat haddock hamlet "
    "hammock hamster harbor harness harvest hatchet hazel heron hexagon hickory hillside hockey "
    "honey horizon hornet hotel hurdle iceberg igloo indigo insect island jacket jaguar jasmine "
    "jelly jigsaw jockey journal jungle juniper kayak kernel kettle keyboard kimono kingdom "
    "kitchen kitten knapsack koala ladder ladle lagoon lantern lasso laundry lavender lawyer "
    "leather lemon lentil leopard lettuce library lighthouse lilac lizard lobster locket "
    "locomotive lotus lumber lynx magpie mallet mango mantle maple marina market marsh mattress "
    "meadow melody melon mermaid meteor mineral minnow mirror mitten moccasin monsoon mosaic "
    "mountain muffin museum mushroom mustard napkin nebula necklace needle nickel notebook nugget "
    "nutmeg oasis oatmeal observatory ocean octopus omelet onion orbit orchard orchestra orchid "
    "organ osprey ostrich oven oxygen oyster paddle pajamas palace panther papaya parade parcel "
    "parrot parsley pasture peacock peanut pebble pelican pencil pendant penguin pepper pharmacy "
    "piano pickle pigeon pillow pioneer pirate pistachio planet plaza pocket poem poncho poplar "
    "porcelain porridge potato pottery prairie prism propeller puddle pumpkin puppet pyramid "
    "quarry quartz quilt quiver rabbit raccoon radar radish raisin raven razor reef reindeer "
    "reservoir ribbon ripple ritual river robin rocket roof rooster rudder saddle saffron sailor "
    "salad salmon sandal sapphire sardine satchel satellite sauna sausage saxophone scallop "
    "scarecrow scholar scissors scooter scorpion sculptor seaweed senator shadow shawl shelf "
    "shepherd sheriff shovel shrimp shuttle sidewalk siren sketch skillet sled slipper snail sofa "
    "soldier sparrow spatula spider spinach sponge squirrel stadium staircase stapler statue "
    "stencil stirrup stove studio suitcase summit sunset surgeon swallow swamp sweater syrup "
    "tablet tailor tambourine tavern teapot telescope temple terrace theater thimble thistle "
    "thunder ticket timber toast tomato topaz torch tornado tortoise tractor trellis trolley "
    "trombone trophy trumpet tulip tundra tunnel turbine turnip turtle tuxedo umbrella unicorn "
    "vaccine valley vanilla veranda vessel viaduct village vineyard vinyl viola volcano voyage "
    "vulture waffle wagon waiter walnut walrus warehouse waterfall weasel wharf wheat whisker "
    "whistle widget willow window winter wizard wolf workshop yacht yogurt zebra zeppelin zipper "
    "zucchini";

constexpr std::string_view kVerbs =
    "abandon absorb accept achieve acquire adjust admire adopt advise agree amuse announce apply "
    "argue arise arrange arrive assemble assist assume attach attend avoid banish bargain beckon "
    "become behave believe belong blink borrow bother breathe bring build calculate carve "
    "celebrate challenge choose climb collect combine command compare complain compose conceal "
    "confess connect consider construct consult convince cough crawl create decide declare "
    "decorate delay deliver demand deny depend descend describe deserve destroy develop devour "
    "discover discuss display dissolve divide donate double drift educate embrace emerge employ "
    "encourage enjoy enlarge enter escape examine exceed exist expand expect explain explore "
    "express extend fasten fetch finish flatter float follow forbid forget forgive gather giggle "
    "glance govern grasp greet grumble guess gulp happen hasten hesitate hover hurry ignore "
    "imagine imitate improve include increase inform inherit inquire insist inspect install "
    "invent invite involve jostle juggle kneel laugh launch learn linger listen manage marvel "
    "measure meddle melt mend mention migrate mingle modify multiply mumble munch murmur neglect "
    "negotiate nibble notice obey observe obtain occupy offer operate oppose overcome paint pause "
    "perform permit persuade plunge ponder possess pounce practice praise prefer prepare present "
    "pretend prevent proceed produce promise protect provide publish punish purchase pursue "
    "quarrel quench quote recall receive recite recover reduce reflect refuse regret reject "
    "rejoice release rely remain remember remind remove repair repeat replace reply rescue "
    "resemble resist retire retreat return reveal reverse revolve roam rummage scatter scramble "
    "scribble search select separate settle shiver shout shrug signal snatch sneeze snore soothe "
    "sprinkle squeeze stagger startle stretch struggle stumble submit succeed suggest supply "
    "support suppose surround survive suspect tempt threaten thrive throw tickle tremble triumph "
    "twinkle unfold unite vanish venture wander weave welcome whisper wiggle withdraw wither "
    "wonder wrestle yawn yearn yield";

std::vector<std::string> split(std::string_view text) {
  std::vector<std::string> words;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find(' ', begin), text.size());
    words.emplace_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return words;
}

}  // namespace

const std::vector<std::string>& adjectives() {
  static const std::vector<std::string> words = split(kAdjectives);
  return words;
}

const std::vector<std::string>& nouns() {
  static const std::vector<std::string> words = split(kNouns);
  return words;
}

const std::vector<std::string>& verbs() {
  static const std::vector<std::string> words = split(kVerbs);
  return words;
}

}  // namespace sbtrain
