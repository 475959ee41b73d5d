"""The plots of the tinyworld's stories: for each, a row of scenes, and for each scene its wordings.

`{name}` is the hero with all facts, `{o_name}` the other character (fields with `o_`), the rest is chance:
`{day}`, `{season}`, `{weather}`, `{time}`, `{spot}`, `{small}` (a small creature),
`{mood}` of the same, `{thing}` and `{adj}`, `{vessel}`, `{number}`.
Pure text, no logic; prose.py tells the stories.
"""

from quern.text.tinyworld.facts import lines

DAYS = tuple("Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split())
MONTHS = tuple("January February March April May June July August September October November December".split())
SEASONS = ("spring", "summer", "autumn", "winter")
WEATHER = tuple("rainy sunny windy foggy cloudy frosty warm cold bright misty stormy".split())
TIMES = ("morning", "afternoon", "evening", "night")
SPOTS = lines("""
    an old oak
    the wooden bridge
    the village well
    a hollow log
    the garden gate
    a mossy stone
    the apple tree
    the blue door
    the hay cart
    the empty barn
    the river bank
    a pile of leaves
    the stone wall
    the market stall
    the tall reeds
    the old stove
    """)
VESSELS = ("basket", "bucket", "barrel", "wagon", "kettle", "sack", "jar", "bowl", "chest", "handcart")
SMALL = tuple(
    """
snail beetle ladybird sparrow cricket moth duckling newt butterfly caterpillar dragonfly wren shrew lizard
spider minnow
""".split()
)
THINGS = tuple(
    """
basket blanket bucket ladder kettle rope candle pencil hammer cushion wagon barrel button spoon pillow
wheelbarrow letter parcel bottle
""".split()
)

OPENINGS = lines("""
    Once upon a time there [was|lived] {a_kind} [named|called] {name}.
    In {home}, {lies}, there lived {a_kind} [named|called] {name}.
    This is a story about {name} the {kind}.
    {name} the {kind} woke up early one {weather} {day}.
    It was a {weather} {time} in {home}, the village of {name} the {kind}.
    Long ago, or perhaps last {day}, {name} the {kind} had an adventure.
    Listen, and I will tell you about {name}, {a_kind} from {home}.
    On a {weather} {day} in {season}, {name} the {kind} looked out of the window in {home}.
    """)

ENDINGS = lines("""
    And that was the end of a very good {day}.
    [That night|That evening] {name} fell asleep with a smile.
    From that day on, {name} and {o_name} told the story [again and again|to everyone they met].
    And if you ask {name} about it today, {he} only smiles.
    "What a day," said {name}, and {he} went home to {home}.
    So it was, and so it is still told in {home}.
    After that they sat by the fire until the stars came out.
    And they both laughed until their sides hurt.
    """)

BRIDGES = lines("""
    But that was not all.
    The next {season} there was another adventure.
    Not long after that, {name} met somebody else.
    That was one story about {name}, and here is another.
    """)

MORALS = lines("""
    A friend who helps is worth more than gold.
    It is good to ask when you do not know the way.
    Small hands can do great things.
    Slow work is still work, and good work takes time.
    It is never too late to say sorry.
    A shared meal always tastes better.
    Whoever looks with patience will find.
    Being kind costs nothing.
    """)

PLOTS: tuple[tuple[tuple[str, ...], ...], ...] = (
    (  # the lost treasure
        lines("""
        {name} had a treasure, {a_treasure}, and {he} [looked at|polished] it every {time}.
        More than anything else {name} loved {his} {treasure}, an old and shining treasure.
        {name}'s treasure was {a_treasure}, and {he} would never give it away.
        """),
        lines("""
        But one {weather} {day} the {treasure} was [gone|nowhere to be found].
        Then, on a {weather} {time}, {he} reached for the {treasure}, and it was not there.
        One {day} {he} opened the {adj} box under the bed, and the {treasure} was missing!
        """),
        lines("""
        {name} looked under the bed, behind {spot} and even in the {vessel}.
        "Oh no," cried {name}, "where can my {treasure} be?"
        {He} searched the whole of {home}, but {he} found only a {small} and {a_adj} {thing}.
        {He} asked the neighbours, and {he} asked a {small}, but nobody had seen it.
        """),
        lines("""
        So {he} went to {o_home} and asked {o_name} the {o_kind} for help.
        {o_name} the {o_kind} heard about it and came running from {o_home}.
        At last {he} met {o_name}, the {o_work} from {o_home}, who said, "I will help you look."
        """),
        lines("""
        Together they looked near {spot}, and there it lay!
        "Think, {name}," said {o_name}. "Where were you when you last held it?" Then {he} remembered {spot},
            and
            there it was.
        A {mood} {small} had borrowed the {treasure} to [sleep on it|play with it], and it gave it back
            with a
            blush.
        Something shone beside {spot}: it was the {treasure}, safe and sound.
        """),
    ),
    (  # a present for a friend
        lines("""
        {o_name} had a birthday on {day}, and {name} wanted to [bring|give] {o_him} something special.
        "Tomorrow is the birthday of {o_name}," thought {name}, "and I have no present yet!"
        """),
        lines("""
        {name} knew that {o_name} loved to eat {o_food} more than any other food.
        Everyone knew that {o_name} liked {o_food} best, so {name} decided to [bring|find] some.
        {o_name}'s favourite food was {o_food}, and {o_his} favourite colour was {o_colour}.
        """),
        lines("""
        So {name} filled {a_adj} {vessel} with {o_food} and tied {o_a_colour} ribbon around it, because
            {o_colour} was
            the colour {o_name} liked best.
        {He} put the {o_food} into a {vessel}, covered it with {o_a_colour} cloth and set off to {o_home}.
        {name} worked in the kitchen for {number} hours, and in the end every plate was full of {o_food}.
        """),
        lines("""
        On the way the wind blew so hard that {he} had to rest at {spot}.
        Near {spot} {he} met a hungry {small}, and {name} gave it a little taste.
        {He} slipped by {spot}, but luckily nothing was spilled.
        """),
        lines("""
        "For me?" cried {o_name} the {o_kind}. "You remembered that I love {o_food}!"
        When {o_name} saw the {o_food}, {o_he} danced for joy in the middle of {o_home}.
        {o_name} laughed, hugged {name}, and shared the {o_food} with the whole village of {o_home}.
        """),
    ),
    (  # lost in the weather
        lines("""
        {name} was on the way home to {home} when [the fog came down|it began to snow|a storm came up].
        One {weather} {time} {name} could not find the road to {home} any more.
        """),
        lines("""
        Everything looked the same: the trees, the stones, and even {spot}.
        {He} walked past {spot} once, twice, three times, and felt very small.
        "I live in {home}," {he} told a {small}, "but I do not know where {home} is from here."
        """),
        lines("""
        Luckily {he} had {his} {treasure} in the bag, for {he} took this treasure everywhere.
        To stay brave {he} thought of {food}, {his} favourite food.
        To keep warm {he} thought of {hobby}, which {he} loved most of all.
        """),
        lines("""
        Then a light came nearer, and behind the light came {o_name} the {o_kind}.
        Suddenly somebody called, and it was {o_name}, the {o_work} from {o_home}!
        """),
        lines("""
        "Follow me," said {o_name}, and step by step they came to {home}, {lies}.
        {o_name} knew the way, and soon they saw {home}, {lies}.
        "Take my {adj} lamp," said {o_name}, and in its light they found {home}, {lies}.
        """),
    ),
    (  # a day at work
        lines("""
        {name} was {a_work}, and every day {he} went to the {place} early.
        {name} worked as {a_work}, and on {day} there was a lot to do.
        There was always work for {name} the {work} of {home}.
        """),
        lines("""
        That {time} {o_name} the {o_kind} came to the {place} with a sad face.
        The door of the {place} opened, and in came {o_name}, {o_a_work} from {o_home}.
        """),
        lines("""
        "Dear {name}," said {o_name}, "I need {number} {things} by {day}!"
        "Can you help me?" asked {o_name}. "Nobody knows as much about {things} as you do."
        "I am only {o_a_work}," said {o_name}, "and I know nothing about {things}."
        """),
        lines("""
        {name} worked all day and half of the night, and a {small} held the candle.
        {name} took {a_adj} {thing}, rolled up {his} sleeves and began.
        {He} thought for a while, ate some {food}, which {he} loved, and then {he} had an idea.
        """),
        lines("""
        "There you are," said {name} the {work}, "and it costs only a smile."
        In the end everything was ready, and {o_name} paid with {o_food}, {o_his} own favourite food.
        Since then everybody says that {name} is the best {work} in {home}.
        """),
    ),
    (  # the contest
        lines("""
        In {season} there was a [great|merry] {hobby} contest in {o_home}.
        A letter came to {home}: the {hobby} contest would be on {day}!
        """),
        lines("""
        {name}, who loved {hobby}, could hardly sleep.
        {Hobby} was {name}'s hobby, and {he} practised every {time}.
        Since {hobby} was what {name} did for fun, {he} wanted to take part.
        """),
        lines("""
        {friend}, {his} best friend, tied {a_colour} scarf around {his} neck for luck, for {colour} was {his}
            favourite colour.
        "You can do it," said {friend}, who was {name}'s best friend.
        {He} packed {food}, the food {he} liked best, and walked to {o_home}.
        """),
        lines("""
        On the way {he} found {o_name} the {o_kind}, who had fallen near {spot} and could not stand up.
        On the way {he} found {o_name} the {o_kind} sitting sadly by {spot} with a sore foot.
        """),
        lines("""
        {name} stopped and helped {o_name}, and so {he} came last. But the whole of {o_home} cheered for
            {him}.
        They went on together, {name} won the second prize, and {o_name} clapped the loudest.
        So {name} carried {o_name} all the way, and they shared the prize: {a_adj} {thing}.
        """),
    ),
    (  # two colours
        lines("""
        {name} had bought a little boat, but it was grey and dull.
        The old fence of {name}'s house in {home} needed new paint.
        {name} wanted to paint the door of the {place}.
        """),
        lines("""
        "It must be {colour}," said {name}, because {colour} was {his} favourite colour.
        Of course {name} chose {colour}, for {he} loved that colour best.
        """),
        lines("""
        "Better {o_colour}!" said {o_name} the {o_kind}, whose favourite colour was {o_colour}.
        {o_name} came by with a pot of {o_colour} paint, because {o_colour} was the colour {o_he} liked best.
        """),
        lines("""
        They argued until a {small} fell into the paint and left {number} tiny footprints.
        They could not agree, so they sat down by {spot} and ate {food}, which {name} loved.
        """),
        lines("""
        In the end one side was {colour} for {name} and the other side was {o_colour} for {o_name}.
        Then they painted stripes, {colour} for {name} and {o_colour} for {o_name}, and both of them were
            happy.
        """),
    ),
    (  # a new neighbour
        lines("""
        One {weather} {time} {name} met {o_a_kind} at {spot}.
        One {day} somebody new came to {home}: it was {o_a_kind} with {a_adj} {thing}.
        """),
        lines("""
        "I am {o_name}, and I come from {o_home}," said the {o_kind}.
        "My name is {o_name}," said the stranger, "and I am {o_a_work} from {o_home}."
        """),
        lines("""
        "And I am {name}," said the {kind}. "I am {a_work} here, and I love {hobby}."
        "Welcome to {home}!" said {name}. "I am the {work} of this village, and my best friend is {friend}."
        """),
        lines("""
        One of them liked {food} and the other {o_food}, so they shared both: {food} for {name}, {o_food} for
            {o_name}.
        {o_name} showed {name} {o_a_treasure}, and {name} showed {o_name} {a_treasure}, for everyone has a
            treasure.
        {name} talked about {hobby} and {o_name} about {o_hobby}, each about the hobby they loved.
        """),
        lines("""
        When the sun went down, they knew that they would meet again on {day}.
        "You are not a stranger any more," said {name}, and gave {o_him} {a_adj} {thing} to take home.
        """),
    ),
    (  # the picnic
        lines("""
        {name} and {o_name} planned a picnic at {spot}.
        On {day} {name} invited {o_name} the {o_kind} to a picnic.
        """),
        lines("""
        {name} brought {food}, because {he} liked nothing better, and {o_name} brought {o_food} for the same
            reason.
        In the {vessel} there was a lot of {food}, {name}'s favourite food, and {o_name} had packed {o_food}.
        """),
        lines("""
        A {small} came first, then {number} of its cousins, and soon half of the meal was gone.
        Then dark clouds came up behind the hill, and rain fell on everything.
        """),
        lines("""
        "Never mind," said {o_name} the {o_work}, "let us go to my house in {o_home}."
        "My {place} is warm and dry," said {name} the {work}, and they ran to {home}.
        """),
        lines("""
        There they talked about {hobby}, which {name} loved, and about {o_hobby}, which {o_name} loved.
        Later {friend}, {name}'s best friend, came by with {a_adj} {thing} and a song.
        """),
    ),
    (  # the broken bridge
        lines("""
        After the stormy night the bridge on the road from {home} to {o_home} was broken.
        The {season} flood had carried away the bridge between {home} and {o_home}.
        """),
        lines("""
        {name} the {kind} stood on one side, and {o_name} the {o_kind} stood on the other.
        "How shall we meet now?" called {name} from {home}, and across the water {o_name} from {o_home} asked
            the
            same.
        """),
        lines("""
        "I am {a_work}," called {name}, "but today I will be a builder!" And {o_name}, who was {o_a_work},
            agreed.
        "Surely {a_kind} and {o_a_kind} can build a bridge," said {name}. "We only need {number} planks
            and some
            rope."
        """),
        lines("""
        {friend}, {name}'s best friend, brought a rope, and {o_friend}, {o_name}'s best friend, brought a
            ladder.
        They worked until {day}, and to rest {name} enjoyed {hobby} and {o_name} enjoyed {o_hobby}.
        """),
        lines("""
        Then the bridge stood again, painted {colour} by {name}, who loved {colour}.
        At the feast there was {food} for {name} and {o_food} for {o_name}, for that was what each of them
            liked best.
        """),
    ),
    (  # the secret letter
        lines("""
        A {mood} little {small} brought {name} a letter without a name.
        One {time} {name} found a letter under {a_adj} {thing} in the {place}.
        """),
        lines("""
        "Dear {work} of {home}," it said, "come to {spot} on {day}, and bring some {food}, which I know you
            love."
        "Dear {kind}," it said, "I have seen you {hobby}, and you do it so well. Meet me at {spot}."
        """),
        lines("""
        {name} put on the {colour} coat, for {he} loved {colour}, took {his} {treasure} for luck, and went.
        "Who can it be?" wondered {name}. "Perhaps it is {friend}, my best friend." But it was not.
        """),
        lines("""
        At {spot} stood {o_name}, {o_a_kind} from {o_home}, and looked at the ground.
        Behind {spot} sat {o_name} the {o_work}, who was [a little|very] shy.
        """),
        lines("""
        "I only wanted to show you my {o_treasure}," said {o_name}. "It is my treasure, and I show it to
            nobody else."
        "I have nobody to share my {o_food} with," said {o_name}, "and {o_food} is my favourite food." So they
            shared.
        "Will you teach me?" asked {o_name}. And that is how {a_kind} and {o_a_kind} came to be friends.
        """),
    ),
    (  # the cold winter
        lines("""
        It was the coldest winter that {home} had ever seen, and {name} the {kind} had no firewood left.
        Snow lay on all the roofs of {home}, and {name}'s door would not open any more.
        """),
        lines("""
        "I could burn the {thing}," thought {name}, "but never my {treasure}, for it is my treasure."
        {He} wrapped {himself} in {a_colour} blanket, {his} favourite colour, and dreamed of {food}, {his}
            favourite
            food.
        """),
        lines("""
        Then there was a knock, and outside stood {o_name} the {o_work} with {a_adj} sled.
        Through the snow came {o_name}, {o_a_kind} from {o_home}, and behind {o_him} came {number} neighbours.
        """),
        lines("""
        "We have brought wood, and some {food}," said {o_name}, "because we know what you like to eat."
        "Come to {o_home}," said {o_name}. "My stove is warm, and there is enough {o_food} for two, because I
            love it."
        """),
        lines("""
        They sat by the stove, and {name} told {o_name} everything about {hobby}, which {he} loved.
        When the snow melted in {month}, {name} thanked {o_name} with {a_adj} {thing}.
        """),
    ),
)
