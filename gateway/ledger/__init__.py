"""The ledger: what happened to every request, counted exactly and kept in one file for all workers.

`Book` counts in memory, `Store` holds the file, `query` asks it, `report` makes lines that people read of the answers.
"""

from gateway.ledger.ledger import Ledger, LedgerClosed
from gateway.ledger.rows import OUTCOMES, SAVED, Call, Outcome, Row
from gateway.ledger.tally import Tally

__all__ = ["OUTCOMES", "SAVED", "Call", "Ledger", "LedgerClosed", "Outcome", "Row", "Tally"]
