"""The tools that requests can offer: a few dozen, each with several names, descriptions and wordings.

One line of the tables below is one tool. Names and wordings are separated by `|`; the last request wording of
each tool is held out of training. `[...]` in a request appears only when its optional parameter is in the
schema. Anything that a sample needs to know of a tool is here; how samples are made of it is in tooluse.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Param:
    """One parameter: the slot of requests that fills it, its possible schema names, its kind of value."""

    slot: str
    names: tuple[str, ...]
    kind: str
    about: tuple[str, ...]
    optional: bool = False
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class ToolSpec:
    """One tool: schema variants, request wordings, and what its result looks like."""

    names: tuple[str, ...]
    about: tuple[str, ...]
    params: tuple[Param, ...]
    asks: tuple[str, ...]
    result: tuple[tuple[str, str], ...] = ()
    answers: tuple[str, ...] = field(default=())

    def wordings(self, held_out: bool) -> tuple[str, ...]:
        """Request wordings of one split."""
        return self.asks[-1:] if held_out else self.asks[:-1]


def p(slot: str, kind: str, about: str, names: str = "", choices: str = "") -> Param:
    """A parameter; a slot that ends in `?` is optional."""
    name = slot.rstrip("?")
    options = tuple(choices.split("|")) if choices else ()
    return Param(
        name, tuple((names or name).split("|")), kind, tuple(about.split("|")), slot.endswith("?"), options
    )


def tool(
    names: str, about: str, params: list[Param], asks: str, result: str = "", answers: str = ""
) -> ToolSpec:
    """A tool; `result` lists its fields as `name=kind` (a kind of values.py, or words separated by commas)."""
    fields = tuple((f.split("=")[0], f.split("=")[1]) for f in result.split("|")) if result else ()
    return ToolSpec(
        tuple(names.split("|")),
        tuple(about.split("|")),
        tuple(params),
        tuple(asks.split("|")),
        fields,
        tuple(answers.split("|")) if answers else (),
    )


CITY = p("city", "city", "The city|Name of the city|City name, for example Paris", "city|location|place|town")
SKY = "sunny,cloudy,rainy,windy,snowy,foggy"

TOOLS: tuple[ToolSpec, ...] = (
    tool(
        "get_weather|weather|get_current_weather|current_weather|fetch_weather|weather_lookup",
        "Get the current weather in a city|Current weather of a place|Get the weather for a location",
        [CITY, p("unit?", "choice", "Temperature unit|The unit", "unit|units", "celsius|fahrenheit")],
        "What is the weather in {city}[ in {unit}]?|What's the weather in {city}[ in {unit}]?|How is the weather in {city}[, in {unit}]?|"
        "What is the weather like in {city}[ in {unit}]?|Tell me the weather in {city}[ in {unit}].|Check the weather in {city}[ in {unit}].|"
        "Is it cold in {city} today?[ Use {unit}.]|Weather in {city}[ in {unit}]|How warm is it in {city}[ in {unit}]?|"
        "What is the temperature in {city}[ in {unit}]?|What's the weather like today in {city}[ in {unit}]?|"
        "Can you look up the weather for {city}[ in {unit}]?",
        f"temperature=int:-10:35|condition={SKY}",
        "It is {temperature} degrees and {condition} in {city}.|The weather in {city} is {condition}, {temperature} degrees.",
    ),
    tool(
        "get_forecast|weather_forecast|forecast",
        "Get the weather forecast for the next days|Forecast for some days",
        [CITY, p("days", "int:2:9", "Number of days|How many days", "days|num_days|count")],
        "What will the weather be in {city} for the next {days} days?|Give me the {days} day forecast for {city}.|"
        "I need a forecast of {days} days for {city}.|Forecast {city} for {days} days.|Show me the forecast for {city} over {days} days.",
        f"condition={SKY}|high=int:0:35|low=int:-10:10",
        "The next days in {city} will be {condition}, between {low} and {high} degrees.",
    ),
    tool(
        "get_time|current_time|get_current_time|clock|time_in_city",
        "Get the current time in a city|Current local time of a place",
        [CITY],
        "What time is it in {city}?|What is the time in {city}?|Tell me the time in {city}.|What is the current time in {city}?|"
        "How late is it in {city} now?|Local time in {city}?|Can you tell me what time it is in {city}?",
        "time=time",
        "It is {time} in {city}.|The time in {city} is {time}.",
    ),
    tool(
        "calculate|calculator|evaluate|compute|math",
        "Evaluate an arithmetic expression|Calculate the value of an expression|Do math",
        [p("expression", "expression", "The expression|Expression to evaluate, like 2 + 3", "expression|expr|formula|input")],
        "Calculate {expression}.|What is {expression}?|Compute {expression}.|Please work out {expression}.|How much is {expression}?|"
        "Evaluate {expression}|Use the calculator for {expression}.|Can you compute {expression} for me?",
        "result=int:-500:90000",
        "{expression} is {result}.|The result of {expression} is {result}.",
    ),
    tool(
        "add|add_numbers|sum|plus",
        "Add two numbers|Sum of two numbers",
        [p("a", "int:0:9999", "First number|The first number", "a|x|first"), p("b", "int:0:9999", "Second number|The second number", "b|y|second")],
        "Add {a} and {b}.|What is the sum of {a} and {b}?|Add the numbers {a} and {b}.|Sum {a} and {b}.|Please add {a} to {b}|Can you add {a} and {b}?",
        "result=int:0:19998",
        "The sum is {result}.|{a} and {b} make {result}.",
    ),
    tool(
        "multiply|multiply_numbers|product",
        "Multiply two numbers|Product of two numbers",
        [p("a", "int:0:999", "First factor|First number", "a|x|first"), p("b", "int:0:999", "Second factor|Second number", "b|y|second")],
        "Multiply {a} by {b}.|What is {a} times {b}?|What is the product of {a} and {b}?|Multiply {a} and {b}.|Compute the product of {a} and {b}.",
        "result=int:0:99999",
        "The product is {result}.",
    ),
    tool(
        "read_file|Read|open_file|cat_file|view_file|get_file",
        "Read a file|Read the contents of a file|Return the text of a file",
        [p("path", "path", "Path of the file|The file to read|File path", "path|file_path|filename|file")],
        "Read the file {path}.|Show me {path}.|What is in {path}?|Open {path}.|Read {path}|Print the contents of {path}.|"
        "What does the file {path} say?|Please show the contents of the file {path}.",
        "content=sentence",
        "The file says: {content}|{path} contains: {content}",
    ),
    tool(
        "write_file|Write|save_file|create_file",
        "Write text to a file|Create a file with the given content|Save text in a file",
        [p("path", "path", "Path of the file|The file to write", "path|file_path|filename|file"), p("content", "sentence", "Text to write|The new content", "content|text|contents|data")],
        'Write "{content}" to {path}.|Save "{content}" in the file {path}.|Create the file {path} with the text "{content}".|'
        'Put "{content}" into {path}.|Write the text "{content}" to the file {path}.|Make a file {path} that says "{content}".',
        "status=ok,written,saved",
        "I wrote the text to {path}.|The file {path} is saved.",
    ),
    tool(
        "list_directory|list_files|LS|list_dir",
        "List the files of a directory|List the contents of a folder",
        [p("path", "folder", "The directory|Directory path|Folder to list", "path|directory|folder|dir")],
        "List the files in {path}.|What files are in {path}?|Show the folder {path}.|What is in the directory {path}?|List {path}|Which files does the folder {path} have?",
        "files=path",
        "The folder {path} has the file {files}.",
    ),
    tool(
        "run_command|Bash|bash|shell|execute_command|run_shell",
        "Run a shell command|Execute a command in the terminal|Run a command and return its output",
        [p("command", "command", "The command|Command to run|Shell command", "command|cmd|script")],
        "Run `{command}`.|Run the command {command}|Execute {command}|Please run `{command}` in the shell.|Execute the command `{command}`.|"
        "Use the terminal to run `{command}`.|Can you run {command}",
        "output=phrase|exit_code=int:0:2",
        "The command printed: {output}",
    ),
    tool(
        "search_files|Grep|grep|find_in_files|search_code",
        "Search for text in files|Find a pattern in the files of a folder",
        [p("pattern", "word", "Text to find|The pattern", "pattern|query|text"), p("path", "folder", "Where to search|The folder", "path|directory|folder")],
        "Search for {pattern} in {path}.|Find {pattern} in the folder {path}.|Which files in {path} contain {pattern}?|Grep for {pattern} in {path}|Look for the text {pattern} in {path}.",
        "file=path|line=int:1:300",
        "I found it in {file}, line {line}.",
    ),
    tool(
        "delete_file|remove_file|rm",
        "Delete a file|Remove a file from disk",
        [p("path", "path", "Path of the file|File to delete", "path|file_path|filename")],
        "Delete {path}.|Remove the file {path}.|Please delete the file {path}.|Get rid of {path}.|Erase the file {path}.|Can you remove {path}?",
        "status=deleted,ok,removed",
        "The file {path} is deleted.|I deleted {path}.",
    ),
    tool(
        "move_file|rename_file|mv",
        "Move or rename a file|Rename a file",
        [p("source", "path", "Old path|The file to move", "source|old_path|from|src"), p("target", "path", "New path|Where to move it", "target|new_path|to|destination")],
        "Rename {source} to {target}.|Move {source} to {target}.|Please rename the file {source} to {target}.|Change the name of {source} to {target}.|Can you move the file {source} to {target}?",
        "status=moved,ok,renamed",
        "I moved {source} to {target}.",
    ),
    tool(
        "search_web|web_search|search|google|internet_search",
        "Search the web|Search the internet for information|Find web pages",
        [p("query", "phrase", "The query|What to search for|Search terms", "query|q|search_query|keywords")],
        "Search the web for {query}.|Search for {query}.|Look up {query} on the web.|Find pages about {query}.|Google {query}.|Search the internet for {query}.|Please do a web search for {query}.",
        "title=title|url=url",
        "I found the page {title} at {url}.|The best result is {title}, {url}.",
    ),
    tool(
        "fetch_url|WebFetch|open_url|get_page|http_get",
        "Fetch a web page|Download the text of a URL|Open a web address",
        [p("url", "url", "The address|URL of the page", "url|address|link")],
        "Open {url}|Fetch {url}|Download the page {url}|What does the page {url} say?|Get {url}|Load the web page {url}",
        "text=sentence",
        "The page says: {text}",
    ),
    tool(
        "send_email|email|mail|send_mail",
        "Send an email|Send a mail to someone",
        [p("to", "email", "Receiver|Email address of the receiver", "to|recipient|address|email"), p("subject", "phrase", "The subject|Subject line", "subject|title"), p("body", "sentence", "Text of the mail|The message", "body|text|message|content")],
        'Send an email to {to} with the subject "{subject}" and the text "{body}".|Email {to}: subject "{subject}", text "{body}".|'
        'Write a mail to {to} with subject "{subject}" that says "{body}".|Please mail {to}, subject "{subject}", body "{body}".|'
        'Send {to} an email. Subject: "{subject}". Text: "{body}".',
        "status=sent,ok|id=code",
        "The email to {to} is sent.|I sent the email to {to}.",
    ),
    tool(
        "send_message|message|send_sms|text_message",
        "Send a text message to a person|Send a message to a contact",
        [p("to", "name", "Receiver|Name of the receiver", "to|recipient|contact|name"), p("text", "sentence", "The text|Message text", "text|message|body|content")],
        'Send {to} the message "{text}".|Text {to} "{text}".|Tell {to} "{text}".|Message {to}: "{text}"|Send a message to {to} that says "{text}".|Write to {to}: "{text}"',
        "status=sent,delivered",
        "The message to {to} is sent.|I sent your message to {to}.",
    ),
    tool(
        "create_event|add_event|schedule_meeting|calendar_add",
        "Create an event in the calendar|Add a meeting to the calendar",
        [p("title", "phrase", "Title of the event|What it is about", "title|name|summary|event"), p("date", "date", "The date|Day of the event", "date|day"), p("time", "time", "Start time|The time", "time|start_time|start")],
        'Create an event "{title}" on {date} at {time}.|Put "{title}" in my calendar on {date} at {time}.|Schedule "{title}" for {date} at {time}.|'
        'Add the meeting "{title}" on {date} at {time}.|Plan "{title}" on {date} at {time}.|I need a calendar entry "{title}" on {date} at {time}.',
        "status=created,ok|event_id=code",
        "The event {title} is in your calendar on {date} at {time}.|I created the event on {date} at {time}.",
    ),
    tool(
        "set_reminder|remind|create_reminder|add_reminder",
        "Set a reminder|Remind the user of something at a time",
        [p("text", "phrase", "What to remember|Reminder text", "text|message|task|title"), p("time", "time", "When to remind|The time", "time|at|when")],
        "Remind me to {text} at {time}.|Set a reminder for {time}: {text}|At {time} remind me to {text}.|Create a reminder to {text} at {time}.|I need a reminder at {time} to {text}.",
        "status=set,ok",
        "I will remind you at {time}.|The reminder is set for {time}.",
    ),
    tool(
        "set_timer|start_timer|timer",
        "Start a timer|Set a timer for some minutes",
        [p("minutes", "int:1:180", "Minutes|Length in minutes", "minutes|duration|length")],
        "Set a timer for {minutes} minutes.|Start a {minutes} minute timer.|Timer for {minutes} minutes.|Wake me in {minutes} minutes.|Count down {minutes} minutes.|I need a timer of {minutes} minutes.",
        "status=started,running",
        "The timer runs for {minutes} minutes.|Your timer of {minutes} minutes is started.",
    ),
    tool(
        "play_music|play_song|play",
        "Play a song|Play music by an artist",
        [p("title", "title", "Title of the song|The song", "title|song|track"), p("artist", "full_name", "The artist|Who sings it", "artist|by|singer")],
        "Play {title} by {artist}.|Play the song {title} by {artist}.|I want to hear {title} by {artist}.|Put on {title} by {artist}.|Can you play {title} by {artist}?",
        "status=playing,started",
        "Now playing {title} by {artist}.",
    ),
    tool(
        "translate|translate_text|translation",
        "Translate a text into another language|Translate text",
        [p("text", "sentence", "Text to translate|The text", "text|input|sentence"), p("language", "language", "Target language|The language", "target_language|language|to|target")],
        'Translate "{text}" into {language}.|How do you say "{text}" in {language}?|Translate "{text}" to {language}.|What is "{text}" in {language}?|Please translate the text "{text}" into {language}.|I need "{text}" in {language}.',
        "translation=phrase",
        "In {language} it is: {translation}",
    ),
    tool(
        "book_table|reserve_table|restaurant_booking",
        "Book a table in a restaurant|Reserve a table",
        [p("restaurant", "title", "The restaurant|Name of the restaurant", "restaurant|name|place"), p("people", "int:1:12", "Number of people|Number of guests", "people|guests|party_size"), p("time", "time", "The time|When", "time|at")],
        "Book a table at {restaurant} for {people} people at {time}.|Reserve a table for {people} at {restaurant} at {time}.|I want a table at {restaurant} for {people} people at {time}.|"
        "Get me a table for {people} at {restaurant} at {time}.|Please book {restaurant} for {people} people at {time}.",
        "status=booked,confirmed|booking_id=code",
        "Your table at {restaurant} for {people} people at {time} is booked. The booking number is {booking_id}.",
    ),
    tool(
        "search_flights|find_flights|flight_search|get_flights",
        "Search flights between two cities|Find a flight",
        [p("origin", "city", "Departure city|From where", "origin|from|from_city|departure"), p("destination", "city", "Arrival city|To where", "destination|to|to_city|arrival"), p("date", "date", "Day of travel|The date", "date|day|departure_date")],
        "Find a flight from {origin} to {destination} on {date}.|Search flights from {origin} to {destination} on {date}.|I need a flight from {origin} to {destination} on {date}.|"
        "Which flights go from {origin} to {destination} on {date}?|Flights from {origin} to {destination} on {date}, please.|I want to fly from {origin} to {destination} on {date}.",
        "flight=code|departure=time|price=int:50:900",
        "Flight {flight} leaves {origin} at {departure} and costs {price}.|There is flight {flight} at {departure} for {price}.",
    ),
    tool(
        "find_hotel|search_hotels|book_hotel|hotel_search",
        "Find a hotel in a city|Search a hotel",
        [CITY, p("nights", "int:1:14", "Number of nights|How many nights", "nights|num_nights|stay")],
        "Find a hotel in {city} for {nights} nights.|I need a hotel in {city} for {nights} nights.|Search hotels in {city} for {nights} nights.|Where can I stay in {city} for {nights} nights?|Look for a hotel in {city}, {nights} nights.",
        "hotel=title|price=int:40:400",
        "The hotel {hotel} in {city} costs {price} a night.",
    ),
    tool(
        "track_package|track_order|package_status|track_shipment",
        "Track a package|Get the status of a package",
        [p("number", "code", "Tracking number|The number of the package", "tracking_number|number|id|package_id")],
        "Where is my package {number}?|Track the package {number}.|What is the status of package {number}?|Track {number}.|Has the package {number} arrived?|Can you find my package {number}?",
        "status=on the way,delivered,in the warehouse|city=city",
        "The package {number} is {status}. It is in {city}.",
    ),
    tool(
        "get_stock_price|stock_price|get_quote|stock_quote",
        "Get the price of a stock|Current stock price of a symbol",
        [p("symbol", "symbol", "Stock symbol|Ticker symbol", "symbol|ticker|stock")],
        "What is the stock price of {symbol}?|How much is {symbol} stock?|Get the price of {symbol}.|Quote for {symbol}.|What does a share of {symbol} cost?|Tell me the current price of {symbol} stock.",
        "price=amount|currency=currency",
        "A share of {symbol} costs {price} {currency}.|{symbol} is at {price} {currency}.",
    ),
    tool(
        "convert_currency|currency_converter|exchange|exchange_money",
        "Convert an amount of money|Convert between currencies",
        [p("amount", "amount", "The amount|How much", "amount|value|sum"), p("source", "currency", "Currency to convert from|From currency", "from_currency|from|source"), p("target", "currency", "Currency to convert to|To currency", "to_currency|to|target")],
        "Convert {amount} {source} to {target}.|How much is {amount} {source} in {target}?|Change {amount} {source} into {target}.|What are {amount} {source} in {target}?|Exchange {amount} {source} for {target}.",
        "result=amount",
        "{amount} {source} are {result} {target}.",
    ),
    tool(
        "convert_units|unit_converter|convert",
        "Convert a measure into another unit|Convert units",
        [p("value", "amount", "The value|Number to convert", "value|amount|number"), p("source", "unit", "Unit to convert from|From unit", "from_unit|from|source_unit"), p("target", "unit", "Unit to convert to|To unit", "to_unit|to|target_unit")],
        "Convert {value} {source} to {target}.|How many {target} are {value} {source}?|What is {value} {source} in {target}?|Turn {value} {source} into {target}.|I want {value} {source} in {target}.",
        "result=amount",
        "{value} {source} are {result} {target}.",
    ),
    tool(
        "define_word|dictionary|lookup_word|get_definition",
        "Look up a word in the dictionary|Get the meaning of a word",
        [p("word", "word", "The word|Word to look up", "word|term|query")],
        "What does {word} mean?|Define {word}.|Look up the word {word}.|What is the meaning of {word}?|Give me the definition of {word}.|Find {word} in the dictionary.",
        "definition=phrase",
        "{word} means: {definition}",
    ),
    tool(
        "find_contact|get_contact|lookup_contact|search_contacts",
        "Find a contact|Look up the phone number of a person",
        [p("name", "full_name", "Name of the person|The name", "name|person|contact")],
        "What is the phone number of {name}?|Find the contact {name}.|Look up {name} in my contacts.|How can I reach {name}?|Give me the number of {name}.|I need the phone number of {name}.",
        "phone=code|email=email",
        "The number of {name} is {phone} and the email is {email}.",
    ),
    tool(
        "add_to_list|add_item|shopping_list_add|list_add",
        "Add an item to a list|Put something on a list",
        [p("item", "word", "The item|What to add", "item|entry|name"), p("list", "word", "Name of the list|The list", "list|list_name")],
        "Add {item} to the {list} list.|Put {item} on my {list} list.|Add {item} to my {list} list.|Write {item} on the {list} list.|I want {item} on the {list} list.",
        "status=added,ok|count=int:1:30",
        "I added {item} to the {list} list.|{item} is on the {list} list.",
    ),
    tool(
        "set_light|control_light|switch_light|light",
        "Switch a light on or off|Control the light of a room",
        [p("room", "room", "The room|Which room", "room|location|area"), p("state", "choice", "On or off|New state", "state|action|status", "on|off")],
        "Turn {state} the light in the {room}.|Switch {state} the {room} light.|Turn the light in the {room} {state}.|Light {state} in the {room}, please.|Set the {room} light to {state}.|Could you turn {state} the {room} light?",
        "status=ok,done",
        "The light in the {room} is {state}.",
    ),
    tool(
        "set_temperature|thermostat|set_heating",
        "Set the temperature of a room|Control the heating",
        [p("room", "room", "The room|Which room", "room|location|zone"), p("degrees", "int:15:28", "Temperature in degrees|The temperature", "temperature|degrees|value")],
        "Set the {room} to {degrees} degrees.|Heat the {room} to {degrees} degrees.|Make the {room} {degrees} degrees warm.|Set the temperature in the {room} to {degrees}.|I want {degrees} degrees in the {room}.",
        "status=ok,done",
        "The {room} is set to {degrees} degrees.",
    ),
    tool(
        "take_note|save_note|create_note|add_note",
        "Save a note|Write down a note",
        [p("text", "sentence", "Text of the note|The note", "text|note|content|body")],
        'Take a note: "{text}"|Write down "{text}".|Note that "{text}".|Save the note "{text}".|Make a note that says "{text}".|Please note down "{text}".',
        "status=saved,ok|id=int:1:900",
        "I saved the note.|The note is saved.",
    ),
    tool(
        "find_recipe|get_recipe|search_recipes|recipe",
        "Find a recipe|Search a recipe for a dish",
        [p("dish", "word", "The dish|Name of the dish", "dish|name|food|query")],
        "Find a recipe for {dish}.|How do I cook {dish}?|I want to make {dish}. Find a recipe.|Get me a recipe for {dish}.|Look for a {dish} recipe.|Which recipe is there for {dish}?",
        "title=title|minutes=int:5:120",
        "Try {title}. It takes {minutes} minutes.",
    ),
    tool(
        "get_distance|distance|route_distance",
        "Get the distance between two cities|Distance from one place to another",
        [p("origin", "city", "Start|First city", "origin|from|start|city_a"), p("destination", "city", "Goal|Second city", "destination|to|end|city_b")],
        "How far is it from {origin} to {destination}?|What is the distance between {origin} and {destination}?|Distance from {origin} to {destination}?|How many kilometers is it from {origin} to {destination}?|Tell me how far {destination} is from {origin}.",
        "distance=int:20:9000",
        "It is {distance} kilometers from {origin} to {destination}.",
    ),
    tool(
        "create_user|add_user|register_user|new_account",
        "Create a user account|Register a new user",
        [p("name", "full_name", "Name of the user|Full name", "name|full_name|user"), p("email", "email", "Email address|The email", "email|mail"), p("age", "int:10:90", "Age in years|The age", "age|years")],
        "Create a user {name} with the email {email}, age {age}.|Register {name}, {age} years old, email {email}.|Add the user {name}, email {email}, age {age}.|New account for {name}, email {email}, {age} years old.|Make an account for {name} who is {age}, email {email}.",
        "status=created,ok|user_id=code",
        "The user {name} is created with the id {user_id}.",
    ),
    tool(
        "get_user|user_info|lookup_user|fetch_user",
        "Get a user by id|Look up a user account",
        [p("id", "code", "Id of the user|The user id", "user_id|id|user")],
        "Who is the user {id}?|Get the user {id}.|Show the account of user {id}.|Look up user {id}.|Find the user with the id {id}.|I need the data of user {id}.",
        "name=full_name|email=email",
        "User {id} is {name}, email {email}.",
    ),
    tool(
        "get_order|order_status|lookup_order|check_order",
        "Get the status of an order|Look up an order",
        [p("id", "code", "Order number|The order id", "order_id|id|order|number")],
        "What is the status of order {id}?|Check the order {id}.|Where is order {id}?|Look up order {id}.|How is my order {id} doing?|Tell me about the order {id}.",
        "status=shipped,waiting,packed,cancelled|total=amount",
        "The order {id} is {status}. The total is {total}.",
    ),
    tool(
        "cancel_order|order_cancel|stop_order",
        "Cancel an order|Stop an order",
        [p("id", "code", "Order number|The order id", "order_id|id|order|number"), p("reason?", "phrase", "Why it is cancelled|The reason", "reason|comment")],
        "Cancel the order {id}[ because of {reason}].|Please cancel order {id}[, the reason is {reason}].|Stop my order {id}[, reason: {reason}].|I do not want order {id} any more, cancel it[ because of {reason}].|I would like to cancel order {id}[, reason: {reason}].",
        "status=cancelled,ok",
        "The order {id} is cancelled.",
    ),
    tool(
        "rate_movie|rate|give_rating",
        "Rate a movie|Give stars to a movie",
        [p("title", "title", "Title of the movie|The movie", "title|movie|name"), p("stars", "int:1:5", "Stars from 1 to 5|The rating", "stars|rating|score")],
        "Give {title} {stars} stars.|Rate the movie {title} with {stars} stars.|I give {title} {stars} stars.|{stars} stars for the movie {title}.|My rating of {title} is {stars} stars.",
        "status=saved,ok",
        "You gave {title} {stars} stars.",
    ),
    tool(
        "get_news|news|latest_news|headlines",
        "Get the latest news about a topic|News headlines",
        [p("topic", "topic", "The topic|What the news is about", "topic|category|subject|query"), p("count?", "int:1:9", "Number of articles|How many", "count|limit|max_results")],
        "What is the news about {topic}?[ Give me {count}.]|Show me[ {count}] news about {topic}.|Latest news on {topic}[, {count} articles].|Get the headlines about {topic}[, {count} of them].|Is there any news on {topic}?[ {count} articles, please.]",
        "headline=title",
        "The headline is: {headline}",
    ),
    tool(
        "get_population|population|city_population",
        "Get the population of a city|How many people live in a place",
        [CITY],
        "How many people live in {city}?|What is the population of {city}?|Tell me the population of {city}.|How big is {city}?|Population of {city}?|Find out how many people live in {city}.",
        "population=int:1000:9000000",
        "{population} people live in {city}.",
    ),
    tool(
        "roll_dice|dice|random_dice",
        "Roll dice|Roll some dice with a number of sides",
        [p("count", "int:1:6", "Number of dice|How many dice", "count|num_dice|dice"), p("sides", "int:4:20", "Sides of each|Number of sides", "sides|faces")],
        "Roll {count} dice with {sides} sides.|Throw {count} dice with {sides} sides.|Roll {count} dice of {sides} sides each.|I need {count} dice with {sides} sides rolled.",
        "total=int:1:100",
        "The dice show {total}.",
    ),
    tool(
        "query_database|run_query|sql|execute_sql",
        "Count the rows of a table|Query a database table",
        [p("table", "word", "The table|Name of the table", "table|table_name"), p("limit", "int:1:500", "Maximum number of rows|Row limit", "limit|max_rows")],
        "Show {limit} rows of the table {table}.|Get {limit} rows from {table}.|Select {limit} rows from the table {table}.|Query the table {table}, at most {limit} rows.|I want to see {limit} rows of {table}.",
        "rows=int:0:500",
        "The table {table} gave {rows} rows.",
    ),
)  # fmt: skip
