"""Prompts to measure on: answers that copy from the prompt, code edits, answers that do not, and one that turns."""

from __future__ import annotations

ARTICLE = """\
The harbour of Marlow Bay opened its first tidal power station on Tuesday, ending eleven years of planning and two years
of building. The station draws its electricity from sixteen turbines that stand in the narrow channel between the old
lighthouse and the island of Skerry, where the current reaches four metres a second at spring tide. According to the
harbour authority, the turbines will supply about nine thousand homes, which is more than half of the town. "The tide is
the one customer that has never been late," said the harbour master, Elena Whitford, who pressed the button that
released the first blades at 6:40 in the morning. Fishing boats had feared that the turbines would close the channel to
them, but the authority agreed to keep a lane forty metres wide free along the northern shore, and to stop all sixteen
turbines during the two weeks of the herring run in March. The station cost eighty-four million, of which the town paid
a third, the county a third, and a cooperative of four hundred residents the rest. The cooperative expects its first
dividend in five years. Engineers from the university will count seals and porpoises near the turbines for three years;
in a trial last autumn no animal came closer than twenty metres to a moving blade. If the numbers hold, the authority
plans a second row of turbines south of the island, which would bring the total to thirty by the end of the decade."""

CODE = """\
import csv
from datetime import datetime


class OrderBook:
    def __init__(self, path):
        self.path = path
        self.orders = []

    def load(self):
        with open(self.path) as handle:
            reader = csv.DictReader(handle)
            for row in reader:
                self.orders.append(
                    {
                        "id": int(row["id"]),
                        "customer": row["customer"],
                        "amount": float(row["amount"]),
                        "placed": datetime.fromisoformat(row["placed"]),
                    }
                )

    def total(self, customer):
        amount = 0.0
        for order in self.orders:
            if order["customer"] == customer:
                amount += order["amount"]
        return amount

    def newest(self, count):
        ordered = sorted(self.orders, key=lambda order: order["placed"], reverse=True)
        return ordered[:count]
"""

TEMPERATURES = """\
def read_temperatures(lines):
    readings = []
    for line in lines:
        station, value, unit = line.split(",")
        degrees = float(value)
        if unit == "F":
            degrees = (degrees - 32) * 5 / 9
        readings.append((station, degrees))
    return readings


def warmest(readings):
    best_station, best_degrees = None, float("-inf")
    for station, degrees in readings:
        if degrees > best_degrees:
            best_station, best_degrees = station, degrees
    return best_station


def average(readings):
    total = 0.0
    for station, degrees in readings:
        total += degrees
    return total / len(readings)
"""

QUEUE = """\
class JobQueue {
  constructor(limit) {
    this.limit = limit;
    this.running = 0;
    this.waiting = [];
  }

  add(job) {
    this.waiting.push(job);
    this.next();
  }

  next() {
    while (this.running < this.limit && this.waiting.length > 0) {
      const job = this.waiting.shift();
      this.running += 1;
      job().finally(() => {
        this.running -= 1;
        this.next();
      });
    }
  }
}
"""

COPYING = {
    "summary": f"Summarize the article below in a few sentences, using its own words where you can.\n\n{ARTICLE}",
    "repeat": f"Repeat the following article word for word.\n\n{ARTICLE}",
    "code edit": f"Rename `orders` to `entries` in this code. Answer with the whole code.\n\n```python\n{CODE}```",
    "reading": f"{ARTICLE}\n\nWho paid for the station, and what was agreed with the fishing boats? Quote the article.",
}

FREE = {
    "chat": "I have a free weekend and it is going to rain. What could I do at home that is not watching television?",
    "story": "Write a short story about a clockmaker who finds a clock that runs backwards.",
    "arithmetic": "A train leaves at 9:15 and travels 210 km at 84 km/h. When does it arrive? Think step by step.",
    "list": "List ten animals that live in the desert, each with one fact about it.",
}

EDITS = {
    "argument": "Give `warmest` and `average` a docstring each and change nothing else. Answer with the whole code.\n\n"
    f"```python\n{TEMPERATURES}```",
    "method": "Add a method `clear()` that empties `waiting` to this class. Answer with the whole code.\n\n"
    f"```javascript\n{QUEUE}```",
}

BEFORE = """\
Small towns by the sea have begun to look at the water with other eyes. For centuries it brought fish and storms; now
people ask how many kettles a spring tide can boil. Marlow Bay is among the first to have an answer, and since I
happened to pass through last week, I went down to the pier to read what the local paper makes of it."""

AFTER = """\
 Standing there in the drizzle, I could not see much of all that, only a yellow buoy and two men arguing about a rope.
Yet one of them told me that his electric bill had shrunk for the first time since his wedding, and that his mother, who
distrusts anything built after her own house, had asked him whether one could buy a turbine for a pond."""

# A column about the article: prose, five of its sentences word for word, prose.
TURNING = (BEFORE, ARTICLE[ARTICLE.index(" The station draws") : ARTICLE.index(" The station cost")], AFTER)
