"""What may be lost to plain decoding, and what may be spent on finding out: in plain steps, so that 1% of them is 1%.

All that drafts win and lose against plain steps is booked as it happens. While there is a balance, a draft may be a bet; where
there is none, it has to be sure, and what is gained has to be more; and behind the greatest loss, drafts rest. So what is lost
is bounded, whatever texts come, but for what one bet loses before that is seen.
"""

from __future__ import annotations

from dataclasses import dataclass

START, MOST = 1.0, 4.0  # at first; and what is kept of gains
LEAST = -2.0  # where bets end: what goes beyond is forgotten
INCOME = 0.005  # by steps: so much may be lost in the long run
CURIOUS, CURIOUS_MOST = 4.0, 4.0  # what may be spent at first on what does not seem to be best, and at most
INTEREST, SHARE = 0.003, 0.02  # its income, by steps and of what is won
AGAIN = -1.5  # where bets begin again behind the greatest loss
SPARE = 0.3  # that may be lost with what should pay, though there is nothing left
GAIN = 0.02  # drafts should bring so much more than plain steps,
CAUTION = 0.01  # and so much more yet for each plain step that was lost
HOPE = 2.0  # deviations above what is likely that are thought possible, where there is a balance


@dataclass
class Purse:
    balance: float = START
    curiosity: float = CURIOUS
    spent: bool = False  # so much was lost that nothing is borne, until some of it came back

    def earn(self, steps: int) -> None:
        """So many are over."""
        self.balance = min(MOST, self.balance + INCOME * steps)
        self.curiosity = min(CURIOUS_MOST, self.curiosity + INTEREST * steps)
        self.spent = self.spent and self.balance < AGAIN

    def book(self, won: float) -> None:
        """Beyond what plain steps would have brought in the time; below 0: lost."""
        self.balance = max(LEAST, min(MOST, self.balance + won))
        self.spent = self.spent or self.balance <= LEAST
        self.curiosity = min(CURIOUS_MOST, self.curiosity + SHARE * max(0.0, won))

    @property
    def least(self) -> float:
        """Times what plain steps bring, that drafts have to."""
        return 1 + GAIN + CAUTION * max(0.0, -self.balance)

    @property
    def hope(self) -> float:
        """How many deviations above what is likely something may be thought to be."""
        return HOPE * max(0.0, min(1.0, self.balance))

    def bears(self, loss: float) -> bool:
        """With what should pay."""
        return not self.spent and loss <= max(SPARE, self.balance)

    def recovers(self, loss: float) -> float:
        """Steps until it bears that, if nothing happens."""
        need = max(loss if loss > SPARE else LEAST, AGAIN if self.spent else LEAST)
        return max(0.0, (need - self.balance) / INCOME)

    def waits(self, price: float, loss: float) -> float:
        """Steps until it buys that, if nothing happens."""
        return max(0.0, (price - self.curiosity) / INTEREST, (loss - self.balance) / INCOME)

    def buys(self, price: float, loss: float) -> bool:
        """What does not seem to be best: it costs so much, and may lose so much to plain steps. Then it is paid."""
        if price > self.curiosity or loss > self.balance:
            return False
        self.curiosity -= price
        return True
