"""The world that the training texts talk about: word lists and makers of random names.

Half of all names come from the lists below and half from a syllable maker, so that a model
trained on the texts learns to copy names that it never saw. A tenth of each list of names (chosen
by a hash) and a seed space of their own are kept for held-out cases: `World(held_out=True)`.
Common words (jobs, hobbies, foods, ...) are a closed world that held-out texts share.
This module knows nothing of tasks, prompts or tokens.
"""

# ruff: noqa: SIM905 (word lists read best as words)

import random
import re
import zlib
from collections.abc import Iterable

FIRST_NAMES = """
Ada Adam Adele Adrian Agnes Aisha Alan Albert Alex Alfred Ali Alice Alina Alma Amara Amelia Amir
Amy Ana Anders Andrea Andrew Angela Anita Anna Anton Arthur Astrid Aurora Axel Barbara Basil
Beatrice Bella Ben Benedict Bernard Bianca Bjorn Boris Brenda Brian Bruno Camila Carl Carla Carlos
Carmen Carol Caroline Catherine Cecilia Charles Chen Chloe Chris Clara Claudia Clement Cora Cyril
Dana Daniel Daphne David Deborah Dennis Diana Diego Dmitri Dora Doris Dylan Edgar Edith Edmund
Edward Elena Eli Elias Elin Elisa Ella Ellen Eloise Elsa Emil Emily Emma Enrique Eric Erika Ernest
Esther Ethan Eugene Eva Evelyn Fabian Fatima Felix Fernando Fiona Flora Florence Frances Frank
Frida Gabriel Gemma George Gerard Gina Gloria Grace Greta Gustav Hana Hannah Harold Harry Hassan
Hazel Hector Heidi Helen Helga Henri Henry Hugo Ian Ida Igor Ines Ingrid Irene Iris Isaac Isabel
Ivan Ivy Jack Jacob James Jan Jana Jane Janet Jasmine Jason Javier Jean Jenny Jesse Joan Joel
Johan John Jonas Jorge Jose Joseph Joyce Juan Judith Julia Julian June Karen Karim Karl Kate Katya
Keiko Keith Kenji Kevin Kim Klara Klaus Kofi Lara Lars Laura Lea Lena Leo Leon Leonie Leyla Liam
Lidia Lila Lily Lina Linda Lisa Livia Liz Lola Lorenzo Louis Louise Luca Lucas Lucia Lucy Luis
Luisa Luna Lydia Mabel Magda Maja Malik Manuel Marc Marcel Marco Margaret Maria Marie Marina Mario
Marius Mark Marta Martha Martin Mary Mateo Matilda Max Maya Megan Mei Melissa Mia Michael Miguel
Mila Milan Milo Mina Miriam Mohamed Molly Mona Monica Nadia Naomi Natalie Nathan Neil Nelly
Nicolas Niels Nina Noah Noel Nora Norman Olga Oliver Olivia Omar Oscar Otto Pablo Pamela Paola
Patrick Paul Paula Pedro Penelope Peter Petra Philip Pia Pierre Priya Quentin Rachel Ralph Ramon
Raul Rebecca Regina Rena Richard Rita Robert Roberto Robin Roger Rosa Rose Ruben Rupert Ruth Ryan
Sabine Salma Sam Samir Samuel Sandra Sara Sarah Saskia Sean Sebastian Selma Sergio Silvia Simon
Sofia Sonia Sophie Stefan Stella Stephen Susan Sven Sylvia Tamara Tania Tara Tariq Teresa Theo
Thomas Tilda Tim Tina Tobias Tom Tomas Tony Uma Ursula Valentina Valerie Vera Veronica Victor
Victoria Viktor Vincent Viola Violet Walter Wanda Wei Wendy Werner Will William Wilma Xavier Yara
Yasmin Yuki Yusuf Yvonne Zachary Zara Zoe
""".split()

LAST_NAMES = """
Adams Adler Ahmed Allen Alvarez Andersen Anderson Andrade Bailey Baker Barnes Barros Bauer Becker
Bell Bennett Berg Bianchi Bishop Black Blake Bloom Bond Bowen Brandt Braun Brooks Brown Bruce
Burke Burns Campbell Cardoso Carlson Carter Castillo Castro Chapman Chang Cho Clark Cohen Cole
Collins Conti Cook Cooper Costa Cox Crane Cruz Dahl Dalton Daniels Davies Davis Dean Delgado Diaz
Dixon Doyle Dubois Duncan Duran Eastwood Eberhard Edwards Eklund Ellis Engel Evans Farrell
Fernandes Ferrari Ferreira Fischer Fisher Flores Flynn Fontaine Ford Foster Fox Frank Franco Frost
Fuchs Fuentes Fuller Garcia Gardner Gibson Gomez Gonzalez Gordon Graham Grant Gray Green Griffin
Gruber Gupta Haas Hall Hansen Harper Harris Hart Hayes Henderson Hermann Hernandez Herrera Hill
Hoffmann Holm Holt Howard Huang Hughes Hunt Hunter Ibrahim Ito Ivanov Jackson Jacobs Jansen Jensen
Johansson Johnson Jones Jordan Kang Kaplan Kato Kaufman Keller Kelly Kennedy Khan King Klein
Knight Koch Kovacs Kramer Krause Kumar Lambert Lane Lang Larsen Laurent Lee Lehmann Lewis Lim
Lindberg Lopez Lund Maier Marin Marino Marsh Martinez Mason Meyer Miller Mills Mitchell Moore Moor
Morales Moreau Moreno Morgan Morris Moss Muller Murphy Murray Myers Nakamura Navarro Nelson
Neumann Newman Nguyen Nielsen Nilsson Noble Nolan Novak Nunes Olsen Ortega Ortiz Osman Owens Page
Palmer Park Parker Patel Pearce Peng Pereira Perez Peters Peterson Petrov Phillips Pinto Porter
Powell Price Quinn Ramos Reed Reid Reyes Ribeiro Ricci Richards Rivera Roberts Robinson Rogers
Romano Romero Rossi Roth Rowe Russell Russo Ryan Sanchez Sanders Sandoval Santos Sato Sauer
Schmidt Schneider Schulz Scott Serrano Shah Shaw Sharma Silva Simmons Singh Sloan Smith Snow Soto
Spencer Stein Stevens Stewart Stone Suzuki Svensson Tanaka Taylor Thompson Torres Tucker Turner
Vargas Vega Vogel Wagner Walker Wallace Walsh Wang Ward Watson Weaver Webb Weber Weiss Wells West
White Williams Wilson Winter Wolf Wong Wood Wright Wu Yamada Yang Young Zhang Zimmer
""".split()

CITIES = """
Aarhus,Accra,Amsterdam,Ankara,Antwerp,Athens,Atlanta,Auckland,Austin,Baku,Baltimore,Bangkok,
Barcelona,Basel,Beijing,Beirut,Belfast,Belgrade,Bergen,Berlin,Bern,Bilbao,Birmingham,Bogota,
Bologna,Bonn,Bordeaux,Boston,Bremen,Brisbane,Bristol,Brno,Brussels,Bucharest,Budapest,Cairo,
Calgary,Cape Town,Caracas,Cardiff,Casablanca,Chennai,Chicago,Cologne,Copenhagen,Cork,Dakar,Dallas,
Delhi,Denver,Detroit,Dhaka,Doha,Dresden,Dubai,Dublin,Durban,Edinburgh,Florence,Frankfurt,Galway,
Gdansk,Geneva,Genoa,Ghent,Glasgow,Gothenburg,Granada,Graz,Hamburg,Hanoi,Havana,Helsinki,Hong Kong,
Houston,Istanbul,Jakarta,Kampala,Karachi,Kiev,Kigali,Krakow,Kyoto,La Paz,Lagos,Lahore,Leeds,
Leipzig,Lille,Lima,Lisbon,Liverpool,Ljubljana,London,Los Angeles,Luanda,Lucerne,Luxembourg,Lyon,
Madrid,Malaga,Malmo,Manchester,Manila,Marseille,Medellin,Melbourne,Memphis,Mexico City,Miami,
Milan,Minsk,Montreal,Moscow,Mumbai,Munich,Nairobi,Nantes,Naples,New York,Nice,Nicosia,Odessa,
Osaka,Oslo,Ottawa,Oxford,Padua,Palermo,Panama City,Paris,Perth,Philadelphia,Phoenix,Pisa,Plymouth,
Porto,Portland,Prague,Quito,Rabat,Reykjavik,Riga,Rome,Rotterdam,Salzburg,San Diego,San Francisco,
San Jose,Santiago,Sao Paulo,Sarajevo,Seattle,Seoul,Seville,Shanghai,Singapore,Skopje,Sofia,Split,
Stockholm,Strasbourg,Stuttgart,Sydney,Taipei,Tallinn,Tampa,Tbilisi,Tehran,Tokyo,Toronto,Toulouse,
Trieste,Tunis,Turin,Utrecht,Valencia,Vancouver,Venice,Verona,Vienna,Vilnius,Warsaw,Washington,
Wellington,York,Zagreb,Zurich
"""

COMPANY_WORDS = """
Acme Alpine Amber Anchor Apex Arbor Arctic Atlas Aurora Beacon Birch Bluebird Bright Cedar Cobalt
Comet Copper Coral Crescent Crystal Delta Eagle Echo Ember Evergreen Falcon Fern Galaxy Garnet
Golden Granite Harbor Horizon Indigo Ivory Juniper Lantern Lighthouse Lotus Lunar Maple Marble
Meridian Mosaic Nimbus Nova Oak Ocean Olive Onyx Orbit Orchid Osprey Pacific Panorama Pearl
Phoenix Pine Pioneer Polar Prairie Quantum Quartz Raven Redwood River Sable Saffron Sapphire
Silver Solstice Sparrow Spruce Stellar Summit Sunrise Swift Tundra Union Valley Vertex Vista
Willow Zenith
""".split()
COMPANY_TAILS = """
Labs Systems Foods Motors Books Bank Media Studio Energy Logistics Software Robotics Airlines Design
Partners Health Tools Works Travel Textiles Furniture Games Networks Garden Optics Pharma Press
""".split()

JOBS = """
accountant,actor,architect,artist,astronomer,baker,barber,biologist,bookseller,bus driver,butcher,
carpenter,chemist,cook,chef,dancer,data analyst,dentist,designer,doctor,economist,editor,
electrician,engineer,farmer,film director,firefighter,fisherman,florist,gardener,geologist,
graphic designer,hairdresser,historian,illustrator,interpreter,journalist,judge,lawyer,librarian,
locksmith,manager,mathematician,mechanic,midwife,musician,nurse,painter,pharmacist,photographer,
physicist,pianist,pilot,plumber,poet,police officer,postman,professor,programmer,project manager,
psychologist,receptionist,researcher,sailor,sales manager,salesman,scientist,sculptor,secretary,
shopkeeper,singer,social worker,software engineer,soldier,tailor,taxi driver,teacher,technician,
tour guide,translator,truck driver,tutor,vet,waiter,watchmaker,web developer,welder,writer,
zoologist
"""

HOBBIES = """
archery,astronomy,badminton,baking,baseball,basketball,birdwatching,board games,boxing,camping,
canoeing,card games,carpentry,ceramics,chess,climbing,cooking,cricket,crosswords,cycling,dancing,
diving,drawing,embroidery,fencing,fishing,football,gardening,golf,gymnastics,handball,hiking,
hockey,horse riding,jogging,juggling,karate,kayaking,knitting,languages,magic tricks,martial arts,
meditation,model trains,mountain biking,origami,painting,paragliding,photography,ping pong,
playing the guitar,playing the piano,playing the violin,poetry,pottery,puzzles,quilting,reading,
rowing,rugby,running,sailing,scuba diving,sculpture,sewing,singing,skateboarding,skating,skiing,
sketching,snowboarding,stamp collecting,surfing,swimming,table tennis,tennis,travelling,
video games,volleyball,walking,weaving,wine tasting,wood carving,writing,yoga
"""

FOODS = """
apple pie,avocado toast,bagels,baked beans,bananas,barley soup,beef stew,blueberries,bread,
brownies,burritos,butter chicken,cabbage soup,caesar salad,carrot cake,cashews,cheese,cheesecake,
cherries,chicken soup,chili,chocolate,chocolate cake,cookies,corn bread,couscous,crepes,
croissants,cucumber salad,curry,dates,doughnuts,dumplings,eggs,falafel,figs,fish and chips,
fish soup,french fries,fried rice,garlic bread,goulash,grapes,gyros,hamburgers,honey cake,hummus,
ice cream,kebab,kimchi,lasagna,lemon tart,lentil soup,lobster,macaroni,mango,meatballs,minestrone,
moussaka,mushroom soup,muffins,nachos,noodles,oatmeal,olives,omelettes,onion soup,oranges,oysters,
paella,pancakes,pasta,peaches,peanut butter,pears,pickles,pierogi,pineapple,pizza,plums,popcorn,
porridge,potato salad,pretzels,pudding,pumpkin soup,quiche,ramen,raspberries,ravioli,rice pudding,
risotto,roast chicken,salmon,sandwiches,sauerkraut,scrambled eggs,shrimp,spaghetti,spring rolls,
steak,strawberries,sushi,tacos,tiramisu,toast,tofu,tomato soup,tuna salad,vegetable curry,waffles,
walnuts,watermelon,yogurt
"""

COLOURS = """
amber,beige,black,blue,bronze,brown,burgundy,coral,crimson,cyan,dark blue,dark green,gold,gray,
green,indigo,ivory,khaki,lavender,light blue,lilac,lime,magenta,maroon,mint,navy,olive,orange,
peach,pink,plum,purple,red,rose,ruby,salmon,sky blue,silver,tan,teal,turquoise,violet,white,yellow
"""

MUSIC = """
ambient music,baroque music,bluegrass,blues,bossa nova,chamber music,choir music,classical music,
country music,dance music,disco,electronic music,film music,flamenco,folk music,funk,gospel,
guitar music,heavy metal,hip hop,house music,indie rock,jazz,latin music,opera,organ music,
piano music,pop music,punk rock,rap,reggae,rock music,salsa,samba,soul music,swing,tango,techno,
trance
"""

PETS = """
cat,dog,parrot,hamster,rabbit,turtle,horse,goldfish,canary,lizard,snake,ferret,mouse,rat,duck,goat,
pony,guinea pig,kitten,puppy,hedgehog,tortoise,pig,donkey,chicken,goose
"""

ITEMS = """
alarm clock,armchair,backpack,basket,bath towel,bedside lamp,bell,belt,bench,bicycle,blanket,
blender,bookshelf,bottle,bowl,box,bracelet,broom,brush,bucket,calculator,calendar,camera,candle,
carpet,chair,chess set,clock,coat,coffee grinder,coffee machine,comb,compass,cup,curtain,cushion,
desk,desk lamp,dictionary,dress,drill,drum,fan,flute,fork,frying pan,garden chair,garden hose,
glass,globe,glove,guitar,hammer,handbag,hat,headset,heater,helmet,jacket,jar,kettle,keyboard,kite,
knife,ladder,lamp,laptop,leather bag,lunch box,map,mattress,microphone,microwave,mirror,monitor,
mouse pad,mug,necklace,notebook,office chair,oven,paint brush,painting,pan,pen,pencil,piano,
picture frame,pillow,pillow case,plate,printer,puzzle,radio,rain coat,razor,ring,rope,router,rug,
ruler,sandal,saw,scarf,scooter,screwdriver,shelf,shirt,shoe,shovel,skirt,sleeping bag,sofa,spade,
speaker,spoon,stapler,stool,suitcase,sunhat,sweater,table,table lamp,tablet,tea cup,teapot,
telescope,tent,toaster,toothbrush,torch,towel,tray,tripod,trumpet,umbrella,vacuum cleaner,vase,
violin,wall clock,wallet,wardrobe,watch,watering can,water bottle,whistle,window blind,
wooden spoon,wrench,yoga mat
"""
ADJECTIVES = """
small large blue red green black white wooden silver golden cheap heavy light old new round square
plastic yellow brown grey striped plain folding travel summer winter kids electric vintage
""".split()

THINGS = """
apples oranges pears plums lemons peaches melons cherries carrots potatoes tomatoes onions eggs
cookies cakes muffins rolls sandwiches sweets candies books pens pencils notebooks stamps stickers
cards marbles balls toys dolls kites puzzles coins shells stones flowers roses tulips trees seeds
plants bottles cups plates spoons bowls glasses boxes bags baskets jars chairs tables lamps
candles shirts socks hats buttons beads ribbons keys tickets photos letters postcards balloons
bricks tiles nails screws bolts boards cars trucks bikes boats fish birds chickens ducks sheep
cows horses goats rabbits
""".split()

EVENT_WORDS = """
concert,workshop,lecture,meeting,exhibition,book reading,film night,chess tournament,charity run,
cooking class,dance evening,flea market,garden party,open day,panel discussion,photo walk,picnic,
poetry evening,quiz night,science fair,seminar,street festival,summer party,talk,theatre play,
training day,wine tasting,yoga class,jazz concert,piano recital,city tour,debate,conference,
opening ceremony,food festival,job fair,marathon,ski trip,craft market,hackathon,language course
"""
EVENT_HEADS = """
Spring Summer Autumn Winter Annual Open Modern Ancient Digital Green Young Future Silent Global
Golden Northern Southern Little Great Urban Royal Grand First Midnight Morning Evening Harvest
Winter
""".split()
EVENT_TAILS = """
Concert Workshop Lecture Exhibition Fair Festival Forum Gala Market Meeting Night Parade Party
Picnic Recital Run Seminar Show Summit Talk Tour Tournament Conference Hackathon Marathon Auction
Ball Camp
""".split()

PLACE_HEADS = """
Central Old New North South East West Royal City Town River Lake Garden Market Castle Bridge Harbor
Station Queen King Museum Forest Mill Church Rose Elm Oak Park Victoria Union Liberty
""".split()
PLACE_TAILS = """
Hall Library Museum Park Theatre Gallery Square Hotel Club School Center House Cafe Garden Stadium
Arena Church Market Tower Room Palace Pavilion Studio
""".split()

COUNTRIES = """
Albania,Argentina,Australia,Austria,Belgium,Bolivia,Brazil,Bulgaria,Cameroon,Canada,Chile,China,
Colombia,Croatia,Cuba,Cyprus,Denmark,Ecuador,Egypt,Estonia,Ethiopia,Finland,France,Georgia,
Germany,Ghana,Greece,Guatemala,Hungary,Iceland,India,Indonesia,Iran,Iraq,Ireland,Israel,Italy,
Jamaica,Japan,Jordan,Kenya,Kuwait,Laos,Latvia,Lebanon,Libya,Lithuania,Malaysia,Mali,Malta,Mexico,
Moldova,Mongolia,Morocco,Nepal,Nicaragua,Nigeria,Norway,Oman,Pakistan,Panama,Paraguay,Peru,Poland,
Portugal,Qatar,Romania,Rwanda,Senegal,Serbia,Slovakia,Slovenia,Somalia,Spain,Sudan,Sweden,
Switzerland,Syria,Tanzania,Thailand,Togo,Tunisia,Turkey,Uganda,Ukraine,Uruguay,Venezuela,Vietnam,
Yemen,Zambia,Zimbabwe
"""

BOOK_HEADS = """
The,A,My,Our,The Last,The First,The Lost,The Silent,The Hidden,The Old,The Red,The Blue,The Little,
The Secret,The Long,The Broken,The Golden,The White,The Dark,Beyond the,Under the,Into the
"""
BOOK_NOUNS = """
River Garden House Mountain Road Winter Summer Island Forest Tower Clock Mirror Letter Bridge Door
Ocean Storm Shadow Star Moon Kingdom Harbor Voyage Dream Song Desert Lighthouse Painter Sailor Baker
Doctor Teacher Child Stranger Daughter Brother Captain Queen King Wolf Bird Horse Tiger Rose Stone
""".split()

MONTHS = """
January February March April May June July August September October November December
""".split()
WEEKDAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()

_ONSETS = """
b c d f g h j k l m n p r s t v w z br cr dr fl gr kl kr pl pr sh st th tr sk gl ch qu y
"""
_VOWELS = "a e i o u a e i o ai ea ei ou ia io ee oo"
_CODAS = "n r s l m t k x nd rn st ll ss rt th ck n r s l"
_ENDINGS = "a o i e en in on ia us or el an ar is et ov ez ell ett by ton mar dan"


def split_list(text: str) -> list[str]:
    """The entries of a comma-separated list, newlines dropped."""
    return [entry.strip() for entry in text.replace("\n", " ").split(",") if entry.strip()]


def with_article(noun: str) -> str:
    """ "a lamp", "an umbrella"."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def is_held_out(entry: str) -> bool:
    """True for the tenth of all list entries that training never sees."""
    return zlib.crc32(entry.encode()) % 10 == 0


_heads: list[str] = []
_tails: list[str] = []


def use_pieces(vocabulary: Iterable[str]) -> None:
    """From now on made-up names are often sewn together from these tokens."""
    words = sorted(set(vocabulary))
    _heads[:] = [word for word in words if re.fullmatch("[A-Z][a-z]*", word)]
    _tails[:] = [word for word in words if re.fullmatch("[a-z]+", word)]


class World:
    """A seeded source of names, places, things and numbers.

    A held-out world takes its list entries only from the held-out tenth, and its syllable names
    only from names whose hash training rejects; a training world takes only the others.
    """

    def __init__(self, rng: random.Random, held_out: bool = False) -> None:
        self.rng = rng
        self.held_out = held_out

    def pick(self, name: str) -> str:
        """One entry of the list `name` (a key of `LISTS`) from this world's side of the split."""
        held, train = LISTS[name]
        return self.rng.choice(held if self.held_out else train)

    def syllables(self, low: int = 1, high: int = 2) -> str:
        """A pronounceable lower-case word that is on this world's side of the split."""
        rng = self.rng
        while True:
            parts = []
            for _ in range(rng.randint(low, high)):
                parts += [rng.choice(ONSETS), rng.choice(VOWELS)]
                if rng.random() < 0.35:
                    parts.append(rng.choice(CODAS))
            if rng.random() < 0.5:
                parts += [rng.choice(ONSETS), rng.choice(ENDINGS)]
            word = "".join(parts)
            if 3 <= len(word) <= 10 and is_held_out(word) == self.held_out:
                return word

    def blend(self, name: str) -> str:
        """The head of one word of the list `name` and the tail of another: "Lis" + "don"."""
        _, entries = LISTS[name]
        while True:
            first, second = (self.rng.choice(self.rng.choice(entries).split(" ")) for _ in "12")
            word = first[: (len(first) + 1) // 2] + second[len(second) // 2 :]
            if len(word) >= 3 and is_held_out(word) == self.held_out:
                return word

    def of_pieces(self) -> str:
        """A name made of random pieces of the tokenizer's vocabulary, so that training copies every
        piece, also those that few listed names hold."""
        rng = self.rng
        while True:
            word = rng.choice(_heads) + "".join(rng.choices(_tails, k=rng.choice([0, 1, 1, 2])))
            if 2 <= len(word) <= 14 and is_held_out(word) == self.held_out:
                return word

    def made_up(self) -> str:
        if _heads and self.rng.random() < 0.5:
            return self.of_pieces()
        if self.rng.random() < 0.4:
            return self.blend(self.rng.choice(NAME_LISTS)).capitalize()
        return self.syllables().capitalize()

    def listed_or_made_up(self, name: str) -> str:
        return self.pick(name) if self.rng.random() < 0.5 else self.made_up()

    def first_name(self) -> str:
        return self.listed_or_made_up("first_names")

    def last_name(self) -> str:
        return self.listed_or_made_up("last_names")

    def full_name(self) -> str:
        first, last = self.first_name(), self.last_name()
        if self.rng.random() < 0.04:
            return f"{first} {self.rng.choice('ABCDEFGHJKLMNPRSTW')}. {last}"
        return f"{first} {last}"

    def city(self) -> str:
        return self.listed_or_made_up("cities")

    def country(self) -> str:
        return self.listed_or_made_up("countries")

    def company(self) -> str:
        rng = self.rng
        kind = rng.random()
        if kind < 0.3:
            return self.made_up()
        if kind < 0.5:
            return f"{self.made_up()} {rng.choice(COMPANY_TAILS)}"
        if kind < 0.6:
            return f"{self.last_name()} and {self.last_name()}"
        return f"{self.pick('company_words')} {rng.choice(COMPANY_TAILS)}"

    def lower(self, name: str, made_up: float = 0.25) -> str:
        """A lower-case entry of the list `name`, or often something else.

        A list is short, so without many other words a model learns it by heart instead of
        learning to copy.
        """
        if self.held_out or self.rng.random() >= made_up:
            return self.pick(name)
        word, tail = self.other_word(), self.rng.random()
        if tail < 0.15:
            return f"{word} {self.other_word()}"
        return f"{word} {self.pick(name)}" if tail < 0.25 else word

    def other_word(self) -> str:
        """Pieces of the vocabulary, syllables, a word of any list, or a blend of two such words."""
        kind = self.rng.random()
        if _tails and kind < 0.3:
            return "".join(self.rng.choices(_tails, k=self.rng.choice([1, 2])))
        if kind < 0.4:
            return self.syllables()
        name = self.rng.choice(WORD_LISTS)
        return self.pick(name) if kind < 0.55 else self.blend(name)

    def item(self) -> str:
        rng = self.rng
        noun = self.lower("items")
        return f"{rng.choice(ADJECTIVES)} {noun}" if rng.random() < 0.3 else noun

    def event(self) -> str:
        rng = self.rng
        kind = rng.random()
        if kind < 0.35:
            return self.lower("events", 0.4)
        if kind < 0.65:
            return f"{rng.choice(EVENT_HEADS)} {rng.choice(EVENT_TAILS)}"
        return f"{self.made_up()} {rng.choice(EVENT_TAILS)}"

    def place(self) -> str:
        rng = self.rng
        head = self.made_up() if rng.random() < 0.4 else rng.choice(PLACE_HEADS)
        return f"{head} {rng.choice(PLACE_TAILS)}"

    def book(self) -> str:
        rng = self.rng
        head = rng.choice(BOOK_TITLES)
        noun = self.made_up() if rng.random() < 0.4 else rng.choice(BOOK_NOUNS)
        tail = f" of {self.made_up()}" if rng.random() < 0.25 else ""
        return f"{head} {noun}{tail}"

    def email(self, name: str) -> str:
        rng = self.rng
        words = name.lower().replace(".", "").split()
        number = rng.randint(1, 99)
        user = rng.choice([words[0], words[-1], ".".join(words), f"{words[0]}{number}"])
        return f"{user}@{self.syllables(1, 2)}.{rng.choice(['com', 'org', 'net'])}"

    def phone(self) -> str:
        rng = self.rng
        groups = rng.choice([(3, 4), (3, 3, 4), (4, 4), (2, 3, 3)])
        sep = rng.choice("- ")
        return sep.join("".join(rng.choice("0123456789") for _ in range(n)) for n in groups)

    def date(self) -> str:
        rng = self.rng
        day, month, year = rng.randint(1, 28), rng.randint(1, 12), rng.randint(1985, 2035)
        forms = [
            f"{day} {MONTHS[month - 1]}",
            f"{day} {MONTHS[month - 1]} {year}",
            f"{MONTHS[month - 1]} {day}",
            f"{MONTHS[month - 1]} {day}, {year}",
            f"{year}-{month:02d}-{day:02d}",
        ]
        return rng.choice(forms)

    def time(self) -> str:
        rng = self.rng
        hour, minute = rng.randint(7, 22), rng.choice([0, 0, 15, 30, 30, 45, rng.randint(0, 59)])
        if rng.random() < 0.3:
            return f"{rng.randint(1, 12)}{rng.choice([' am', ' pm', 'am', 'pm'])}"
        return f"{hour}:{minute:02d}"

    def weekday(self) -> str:
        return self.rng.choice(WEEKDAYS)

    def number(self, digits: int) -> int:
        """A number of at most `digits` digits, each length equally likely; never 0."""
        size = self.rng.randint(1, digits)
        return self.rng.randint(10 ** (size - 1), 10**size - 1)

    def price(self) -> str:
        rng = self.rng
        whole = self.number(3)
        if rng.random() < 0.35:
            return str(whole)
        return f"{whole}.{rng.choice([50, 99, 95, 25, 75, rng.randint(10, 99)])}"


def _shared(entries: list[str]) -> tuple[list[str], list[str]]:
    """Common words are a closed world: held-out texts use the same ones as training."""
    unique = sorted(set(entries))
    return unique, unique


def _split(entries: list[str]) -> tuple[list[str], list[str]]:
    unique = sorted(set(entries))
    held = [entry for entry in unique if is_held_out(entry)]
    return held, [entry for entry in unique if not is_held_out(entry)]


ONSETS, VOWELS = _ONSETS.split(), _VOWELS.split()
CODAS, ENDINGS = _CODAS.split(), _ENDINGS.split()
BOOK_TITLES = split_list(BOOK_HEADS)
LISTS: dict[str, tuple[list[str], list[str]]] = {
    "first_names": _split(FIRST_NAMES),
    "last_names": _split(LAST_NAMES),
    "cities": _split(split_list(CITIES)),
    "countries": _split(split_list(COUNTRIES)),
    "company_words": _split(COMPANY_WORDS),
    "jobs": _shared(split_list(JOBS)),
    "hobbies": _shared(split_list(HOBBIES)),
    "foods": _shared(split_list(FOODS)),
    "colours": _shared(split_list(COLOURS)),
    "music": _shared(split_list(MUSIC)),
    "pets": _shared(split_list(PETS)),
    "items": _shared(split_list(ITEMS)),
    "things": _shared(THINGS),
    "events": _shared(split_list(EVENT_WORDS)),
}
NAME_LISTS = ["first_names", "last_names", "cities", "countries"]
WORD_LISTS = ["jobs", "hobbies", "foods", "colours", "music", "pets", "items", "things", "events"]
