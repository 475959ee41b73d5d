"""The tinyworld's dictionary: words that are spelled and counted, words by category, opposites, and small
doings.

Pure word lists, no logic. They give the corpus its vocabulary beyond the characters' facts.
"""

# Spelled and counted; lower-case letters only
WORDS: tuple[str, ...] = tuple(
    sorted(
        set(
            """
acorn almond anchor apple apron arrow autumn balloon banana bandana barley barn barrel basket beach bean
beaver bee beekeeper beetle bell berry bird biscuit blanket blossom boat bonfire book boot bottle branch
bread breeze brick bridge broom brush bubble bucket bumblebee button cabbage cabin candle canoe carpet
carrot castle cat cellar chair cheese cherry chestnut chicken chimney clock cloud clover coat cobweb cocoa
coconut coffee compass copper cottage cotton cricket crumb cuckoo cucumber cup cushion daisy degree dinner
donkey door dragonfly drum duck dumpling eagle egg elbow element eleven evening feather fence fern ferry
fiddle finger fire fish flag flour flower flute fog forest fountain fox frog frost garden garlic garnet gate
ginger glass glasses globe glove goat goose grape grass grove hammer harbour harp hat hay hazelnut heather
hedge hen heron hill hive honey hook horse house ice island ivy jacket jam jar jelly jug kettle key king
kitchen kite kitten ladder lake lamb lamp lantern lark leaf lemon letter lettuce lighthouse lily linen
lizard loaf lobster lollipop lullaby map maple marble market marmalade meadow melon mice milk minnow mirror
mole moon moss mother mountain mouse mushroom music needle nest night noodle nutmeg oak oar ocean onion
orchard otter oven owl oyster paddle pancake papaya paper parallel parrot parsley path pea pear pebble
pencil pepper peppermint pickle picnic pie pigeon pillow pine pinecone plum pocket pond poppy porridge pot
potato puddle pumpkin puppy rabbit radish rain rainbow raspberry raven referee ribbon rice ring river road
robin roof root rope rose saddle sail salad salt sand sandwich savanna scarf school seed settlement shadow
sheep shell shelf shoe shovel shower silver sister skirt sky sled sleeve slipper snail snow snowball soap
sock soup spade sparrow spider spinach spoon spring squirrel stable star stone storm stove strawberry straw
stream street string sugar summer sunset supper swallow swan sweater sweetheart table tailor tattoo teapot
telescope thistle thread thunder ticket toad toast tomato towel tower trail tree tulip tunnel turnip turtle
umbrella valley velvet village violet violin wagon waffle walnut water waterwheel wheat wheel whistle willow
windmill window winter wool yarn
""".split()
        )
    )
)

# Things that are counted in word problems, in the plural
THINGS = tuple(
    """
acorns apples bells biscuits blankets books bottles bricks buttons cakes candles carrots chestnuts coins
cups eggs feathers flowers hats jars keys lamps lemons marbles nuts onions pebbles pencils pies plates
potatoes roses sandwiches shells spoons stamps stars stones tickets tomatoes
""".split()
)

# category -> words; each word takes the article that its first letter asks for, and is in one category only
CATALOGUE: dict[str, tuple[str, ...]] = {
    category: tuple(words.split())
    for category, words in {
        "tree": "oak elm beech birch maple willow pine spruce larch poplar chestnut rowan cedar fir aspen",
        "flower": "rose tulip daisy violet lily poppy daffodil primrose marigold bluebell orchid pansy",
        "bird": "sparrow wren swallow lark finch magpie starling pigeon swan crane kingfisher woodpecker",
        "insect": "beetle bee wasp moth cricket grasshopper ladybird butterfly dragonfly gnat ant firefly",
        "fish": "trout salmon perch pike carp minnow herring cod eel mackerel sardine sturgeon",
        "fruit": "apple quince lemon apricot peach melon grape raspberry strawberry fig gooseberry mulberry",
        "vegetable": "onion cabbage turnip radish parsnip leek pumpkin cucumber spinach celery potato",
        "tool": "hammer saw chisel spade rake pliers shovel sickle axe wrench trowel drill crowbar",
        "piece of clothing": "coat scarf glove hat shirt jacket waistcoat apron sock skirt cloak sweater",
        "instrument": "flute harp fiddle trumpet drum banjo oboe piano cello accordion tambourine mandolin",
        "piece of furniture": "chair table bench cupboard bed stool wardrobe bookcase sofa armchair dresser",
        "vehicle": "cart sled canoe ferry barge wagon carriage bicycle raft rowboat sleigh wheelbarrow",
        "building": "barn cottage castle chapel stable tower lighthouse cabin inn palace greenhouse mansion",
        "metal": "iron gold tin brass bronze lead zinc nickel steel",
        "spice": "pepper ginger cinnamon nutmeg saffron vanilla mustard paprika thyme rosemary basil",
        "part of the body": "elbow knee shoulder ankle wrist chin thumb nose ear stomach forehead heel",
        "room": "kitchen bedroom cellar attic pantry hallway parlour nursery bathroom workroom",
        "kind of weather": "rain snow hail thunder sunshine drizzle fog sleet frost breeze",
        "shape": "circle square triangle oval rectangle star cube sphere cylinder hexagon",
        "feeling": "joy sorrow anger fear pride surprise hope envy courage shame delight wonder",
        "game": "chess checkers hopscotch dominoes marbles skittles leapfrog tag charades croquet",
        "drink": "tea milk coffee cider lemonade water cocoa juice broth buttermilk",
    }.items()
}

OPPOSITES = tuple(
    tuple(pair.split("/"))
    for pair in """
hot/cold big/small old/new long/short wide/narrow high/low fast/slow loud/quiet bright/dark heavy/light
hard/soft clean/dirty empty/full wet/dry early/late open/closed rich/poor strong/weak thick/thin happy/sad
brave/afraid sweet/sour sharp/blunt deep/shallow smooth/rough young/aged near/far first/last inside/outside
above/below always/never begin/finish push/pull give/take laugh/weep remember/forget arrive/leave buy/sell
find/lose ask/reply true/false right/wrong easy/difficult safe/dangerous polite/rude simple/complicated
careful/careless tidy/messy front/back summer/winter morning/evening north/south east/west left/right
beautiful/ugly asleep/awake
""".split()
)

# What a thing may be, and how a creature may feel
ADJECTIVES = tuple(
    """
tiny enormous shiny dusty crooked round rusty golden wooden striped spotted fluffy silent elegant ancient
broken patched painted polished forgotten borrowed ordinary remarkable mysterious delicate sturdy wobbly
creaky faded glittering fragrant sticky slippery handsome useful tall narrow smooth secret magnificent
peculiar splendid
""".split()
)
MOODS = tuple(
    """
sleepy noisy curious clumsy gentle grumpy jolly lonely patient puzzled proud shy silly stubborn thirsty
hungry tired wise lively nervous cheerful kind bold polite dreamy
""".split()
)

# Small doings, in the past tense
DOINGS: tuple[str, ...] = tuple(
    line.strip()
    for line in """
    raked the fallen leaves
    fed the neighbour's hens
    washed every window twice
    mended a torn curtain
    planted a row of lettuces
    stacked the firewood neatly
    whistled a new melody
    repaired the squeaky hinge
    climbed the steep staircase of the tower
    counted the passing clouds
    baked a crooked gingerbread house
    carried water from the fountain
    swept the chimney
    wrote a long postcard to an aunt
    invented a rhyme about turnips
    borrowed a sieve and returned a bucket
    gathered chestnuts in an apron
    drew a picture of the harbour
    oiled the wheels of the wagon
    slept until noon
    watered the seedlings
    darned four pairs of socks
    chased a runaway sheep
    listened to the thunder
    caught a cold and drank hot lemonade
    learned the names of the constellations
    sorted buttons by size
    boiled a pot of raspberry jam
    tuned the old piano in the schoolhouse
    missed the ferry and waited patiently
    built a scarecrow out of straw
    polished the doorknob until it gleamed
    rescued a duckling from the ditch
    found a shortcut through the orchard
    traded an umbrella for a watermelon
    hung the laundry between two birches
    skipped stones across the pond
    practised a polite speech
    shelled a mountain of peas
    painted a sign for the market
    folded forty paper swans
    shovelled snow from the path
    admired the sunset from the roof
    lost a game of checkers
    won a game of dominoes
    picked blueberries in the marsh
    told a ghost story at midnight
    knocked at the wrong door
    forgot an appointment and apologised
    brushed the mud from every boot
    measured the height of the sunflowers
    roasted apples over the fire
    collected driftwood on the beach
    welcomed a traveller from the mountains
    guarded the bridge for an hour
    copied a recipe for onion tart
    trimmed the hedge into the shape of a swan
    unpacked a parcel with foreign stamps
    carved a whistle from elder wood
    hummed in the bathtub
    spilled ink on the tablecloth
    chopped parsley for the feast
    read the newspaper aloud
    waved at the sailors
    buried a jar of pickles
    dug a trench for the rainwater
    sharpened all the pencils
    weighed a pumpkin on the scales
    explored the cave behind the waterfall
    danced barefoot on the meadow
    """.strip().splitlines()
)
