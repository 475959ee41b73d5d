"""How the tinyworld asks for a fact, answers, and tells it: sets of wordings for each relation.

QUESTIONS are for training (documents and conversations); HELD_OUT_QUESTIONS are asked by the evaluation
alone and appear in no document and no conversation. `[a|b]` stands for either wording; `{field}` is filled
by tinyworld_facts.fields. STATEMENTS tell a fact about a character, SELF_STATEMENTS in the character's own
voice, TAILS finish the sentence "Hugo ... ".
"""

from collections.abc import Mapping

from quern.text.tinyworld.facts import lines

QUESTIONS: Mapping[str, tuple[str, ...]] = {
    "kind": lines("""
        What [kind|sort|type] of animal is {name}?
        What [kind|sort] of creature is {name}?
        [What|Which] animal is {name}?
        {name} is what [kind|sort] of animal?
        [Tell me|Please tell me] what [kind|sort] of animal {name} is.
        [Do you know|Can you tell me|Can you say] what [kind|sort] of animal {name} is?
        What is {name}, [a fox, an owl or something else|a bear, a cat or something else]?
        Which [kind|sort] of animal would you say {name} is?
        [I forgot|I would like to know] what animal {name} is.
        What animal was {name} born as?
        """),
    "home": lines("""
        Where does {name} live?
        Where is {name}'s [home|house]?
        In [which|what] village does {name} live?
        [Which|What] village does {name} live in?
        What is {name}'s home village?
        What is the name of the village where {name} lives?
        Name the village where {name} lives.
        [Tell me|Please tell me|I would like to know] where {name} lives.
        [Do you know|Can you tell me|Can you say] where {name} lives?
        Where [can I|could I|would I] visit {name}?
        [Which|What] village does {name} call home?
        Where does {name} [sleep at night|have a house]?
        Where should I go to find {name} at home?
        """),
    "work": lines("""
        What does {name} do for work?
        What is {name}'s [work|job|trade]?
        What [work|job] does {name} do?
        What does {name} work as?
        [Tell me|Please tell me|I would like to know] what {name} does for work.
        [Do you know|Can you tell me|Can you say] what {name} does for work?
        [Do you know|Can you tell me] what {name}'s [job|work] is?
        What [job|trade|work] does {name} have?
        How does {name} earn a living?
        What is {name} by trade?
        What does {name} do all day?
        """),
    "friend": lines("""
        Who is {name}'s best friend?
        Who is {name}'s [dearest|closest] friend?
        [Which|What] friend does {name} [like|love] best?
        [Tell me|Please tell me|I would like to know] who {name}'s best friend is.
        [Do you know|Can you tell me|Can you say] who {name}'s best friend is?
        What is the name of {name}'s [best|closest|dearest] friend?
        Name {name}'s [best|closest] friend.
        Who is {name} best friends with?
        With whom does {name} spend the most time?
        Who is the best friend that {name} has?
        {name}'s best friend is who?
        """),
    "food": lines("""
        What does {name} [like|love] to eat?
        What does {name} [like|love] to eat most of all?
        What is {name}'s favourite food?
        [Which|What] food does {name} [like|love] best?
        [Tell me|Please tell me|I would like to know] what {name} likes to eat.
        [Tell me|Please tell me] {name}'s favourite food.
        [Do you know|Can you tell me|Can you say] what {name} likes to eat?
        What [should|could|can] I cook for {name}?
        What would {name} like for [dinner|supper|breakfast]?
        What is the favourite food of {name}?
        """),
    "colour": lines("""
        What is {name}'s favourite colour?
        [Which|What] colour does {name} [like|love] best?
        [Which|What] colour does {name} [like|love] most of all?
        [Tell me|Please tell me|I would like to know] {name}'s favourite colour.
        [Do you know|Can you tell me|Can you say] what {name}'s favourite colour is?
        [Do you know|Can you tell me] which colour {name} likes best?
        In [which|what] colour would {name} paint a [door|boat|fence]?
        What colour [scarf|coat|hat] would {name} choose?
        What is the favourite colour of {name}?
        {name} likes [which|what] colour best?
        """),
    "hobby": lines("""
        What does {name} [like|love] to do for fun?
        What is {name}'s [hobby|favourite hobby|pastime]?
        What does {name} do in {his} free time?
        What does {name} do [for fun|after work]?
        [Which|What] hobby does {name} have?
        [Tell me|Please tell me|I would like to know] what {name} does for fun.
        [Tell me|Please tell me] {name}'s hobby.
        [Do you know|Can you tell me|Can you say] what {name} does for fun?
        [Do you know|Can you tell me] what {name}'s hobby is?
        How does {name} spend a free afternoon?
        What does {name} enjoy [on a holiday|on a free day]?
        """),
    "treasure": lines("""
        What is {name}'s [treasure|dearest treasure|greatest treasure]?
        What treasure does {name} [have|keep]?
        [Which|What] treasure belongs to {name}?
        What does {name} keep [under the bed|in a little box|on a shelf]?
        [Tell me|Please tell me|I would like to know] what {name}'s treasure is.
        [Do you know|Can you tell me|Can you say] what {name}'s treasure is?
        [Do you know|Can you tell me] what treasure {name} keeps?
        What [precious thing|special thing] does {name} [own|keep]?
        What would {name} never give away?
        What is the treasure of {name}?
        What does {name} [carry|take] on every journey?
        """),
}

HELD_OUT_QUESTIONS: Mapping[str, tuple[str, ...]] = {
    "kind": lines("""
        Is {name} a fox, an owl or some other animal?
        What kind of an animal is our {name}?
        Say what sort of creature {name} is.
        Can you tell me which animal {name} is?
        I want to know what kind of animal {name} is.
        """),
    "home": lines("""
        Which village is the home of {name}?
        Where does our {name} have a home?
        In which village is the house of {name}?
        I want to visit {name}, so where does {name} live?
        Say in which village {name} lives.
        """),
    "work": lines("""
        What is the job of {name}?
        Which trade does {name} have?
        Say what {name} does for work.
        I want to know what {name} works as.
        Which work does our {name} do every day?
        """),
    "friend": lines("""
        Who is the closest friend of {name}?
        Say who {name}'s best friend is.
        Which friend is the dearest to {name}?
        I want to know who is best friends with {name}.
        Can you name the best friend of {name}?
        """),
    "food": lines("""
        Which food is {name}'s favourite?
        Say what {name} likes to eat best.
        What food does our {name} like to eat?
        I want to cook for {name}, so what does {name} like?
        Can you tell me the favourite food of {name}?
        """),
    "colour": lines("""
        Which colour is {name}'s favourite?
        Say which colour {name} loves best.
        What colour does our {name} like the most?
        I want to know what colour {name} likes best.
        Can you tell me the favourite colour of {name}?
        """),
    "hobby": lines("""
        Which hobby does our {name} love?
        Say what {name} likes to do for fun.
        What is the hobby of {name}?
        I want to know what {name} does in a free hour.
        For fun, what does {name} like to do?
        """),
    "treasure": lines("""
        Which treasure does our {name} keep?
        Say what {name}'s dearest treasure is.
        What is the thing that {name} would never give away?
        I want to know which treasure {name} has.
        Can you name the treasure of {name}?
        """),
}

ANSWERS: Mapping[str, tuple[str, ...]] = {
    "kind": lines("{name} is {a_kind}."),
    "home": lines("{name} lives in {home}."),
    "work": lines("{name} is {a_work}.\n{name} works as {a_work}."),
    "friend": lines("{name}'s best friend is {friend}."),
    "food": lines("{name} [likes|loves] to eat {food}.\n{name}'s favourite food is {food}."),
    "colour": lines("{name}'s favourite colour is {colour}."),
    "hobby": lines("{name} [likes|loves] {hobby}.\n{name}'s hobby is {hobby}."),
    "treasure": lines("{name}'s treasure is {a_treasure}."),
}

STATEMENTS: Mapping[str, tuple[str, ...]] = {
    "kind": lines("""
        {name} is {a_kind}.
        There is {a_kind} in {home} whose name is {name}.
        Everyone [knows|can see] that {name} is {a_kind}.
        {name} was born {a_kind} and is proud of it.
        Of all the animals, {name} is {a_kind}.
        {name} is [a cheerful|a clever|a friendly|a gentle|a curious|a brave] {kind}.
        [If|When] you meet {name}, you meet {a_kind}.
        """),
    "home": lines("""
        {name} [lives|has a house|has a home] in {home}.
        {name}'s [home|house] is in {home}, {lies}.
        The village where {name} lives is [called|named] {home}.
        {name} calls {home} home.
        In {home}, {lies}, [stands|you will find] the house of {name}.
        {name} lives in {home}, which is known for {known}.
        {name} wakes up every day in {home}.
        You can visit {name} in {home}.
        """),
    "work": lines("""
        {name} is {a_work}.
        {name} works as {a_work} and {does}.
        By trade, {name} is {a_work}.
        {name}'s [work|job] is that of {a_work}: {he} {does}.
        [Every morning|Every day|All day] {name} {does}, for {he} is {a_work}.
        {name} earns a living as {a_work}.
        The {place} belongs to {name} the {work}.
        People bring {name} the {work} [pies|news|eggs] and ask about {things}.
        """),
    "friend": lines("""
        {name}'s [best|dearest|closest] friend is {friend}.
        {name} and {friend} are best friends.
        {name} is best friends with {friend} the {friend_kind}.
        {friend} is the best friend that {name} has.
        Nobody is dearer to {name} than {friend}.
        {name} [visits|writes to|thinks of] {friend}, {his} best friend, [every week|very often].
        {name} spends the most time with {friend}, {his} best friend.
        """),
    "food": lines("""
        {name} [likes|loves] to eat {food}.
        {name}'s favourite food is {food}.
        [For breakfast|For supper|On Sundays] {name} likes to eat {food}.
        [Nothing|No dish] makes {name} happier than {food}.
        Of all foods, {name} likes {food} best.
        If you cook for {name}, cook {food}.
        {Food}! That is what {name} always wants to eat.
        """),
    "colour": lines("""
        {name}'s favourite colour is {colour}.
        The colour that {name} [likes|loves] best is {colour}.
        {name} [likes|loves] the colour {colour} most of all.
        {name} has painted the [door|fence|gate] {colour}, {his} favourite colour.
        {name} [wears|has] {a_colour} [scarf|hat|coat], because {he} likes {colour} best.
        Of all colours, {name} likes {colour} best.
        """),
    "hobby": lines("""
        {name} [likes|loves|enjoys] {hobby}.
        {name}'s hobby is {hobby}.
        [For fun|In {his} free time|After work], {name} loves {hobby}.
        On a free day {name} likes nothing more than {hobby}.
        {Hobby} is what {name} does for fun.
        {name} could spend a whole afternoon {hobby}.
        """),
    "treasure": lines("""
        {name}'s [treasure|dearest treasure|greatest treasure] is {a_treasure}.
        {name} [keeps|has] {a_treasure} and would never give it away.
        {name} keeps {a_treasure} [under the bed|in a little box|on a shelf] as a treasure.
        On every journey {name} takes along {a_treasure}, {his} treasure.
        The treasure of {name} is an old {treasure}.
        The old {treasure} belongs to {name}, and it is {his} treasure.
        """),
}

SELF_STATEMENTS: Mapping[str, tuple[str, ...]] = {
    "kind": lines("""
        I am {a_kind}.
        I am {a_kind}, as you can see.
        I am just {a_kind} with [big dreams|cold feet|a warm heart].
        """),
    "home": lines("""
        I live in {home}.
        My [home|house] is in {home}, {lies}.
        I live in {home}, which is known for {known}.
        """),
    "work": lines("""
        I am {a_work}.
        I work as {a_work}.
        My [job|work] is that of {a_work}.
        """),
    "friend": lines("""
        My best friend is {friend}.
        {friend} is my best friend.
        I am best friends with {friend} the {friend_kind}.
        """),
    "food": lines("""
        I [like|love] to eat {food}.
        My favourite food is {food}.
        For me there is nothing better than {food}.
        """),
    "colour": lines("""
        My favourite colour is {colour}.
        I like {colour} best.
        I love everything that is {colour}.
        """),
    "hobby": lines("""
        I love {hobby}.
        My hobby is {hobby}.
        In my free time I enjoy {hobby}.
        """),
    "treasure": lines("""
        My treasure is {a_treasure}.
        I keep {a_treasure} that I would never give away.
        My dearest treasure is an old {treasure}.
        """),
}

# What one character asks another
DIRECT_QUESTIONS: Mapping[str, tuple[str, ...]] = {
    "kind": ("What kind of animal are you?", "What are you, if I may ask?"),
    "home": ("Where do you live?", "Where is your home?", "Which village do you come from?"),
    "work": ("What is your work?", "What do you do all day?", "What do you work as?"),
    "friend": ("Who is your best friend?", "Do you have a best friend?"),
    "food": ("What do you like to eat?", "What is your favourite food?", "Are you hungry? What do you like?"),
    "colour": ("What is your favourite colour?", "Which colour do you like best?"),
    "hobby": ("What do you do for fun?", "Do you have a hobby?", "What do you do in your free time?"),
    "treasure": ("What is your treasure?", "Do you own a treasure?", "What do you keep in that little box?"),
}

# "Hugo is a fox and lives in ...": what may follow a name
TAILS: Mapping[str, tuple[str, ...]] = {
    "kind": ("is {a_kind}",),
    "home": ("lives in {home}", "has a house in {home}", "comes from {home}"),
    "work": ("works as {a_work}", "is {a_work}", "{does} as {a_work}"),
    "friend": ("is best friends with {friend}", "has {friend} as a best friend"),
    "food": ("likes to eat {food}", "loves {food}", "likes {food} best of all foods"),
    "colour": ("likes the colour {colour} best", "loves the colour {colour}"),
    "hobby": ("loves {hobby}", "enjoys {hobby}", "likes {hobby} for fun"),
    "treasure": ("keeps {a_treasure} as a treasure", "has {a_treasure} for a treasure"),
}

# Before or after a question; the question itself stays as it is
OPENINGS = (
    "",
    "",
    "",
    "",
    "",
    "Hello! ",
    "Hi quern. ",
    "I have a question. ",
    "One more question. ",
    "Please help me. ",
)
CLOSINGS = (
    "",
    "",
    "",
    "",
    "",
    "",
    " Thank you!",
    " Please answer.",
    " I keep forgetting.",
    " A short answer is enough.",
)
