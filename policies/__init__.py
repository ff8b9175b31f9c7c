"""Pure decisions on plain values: no I/O, no clock, no globals; imports nothing but the standard library."""
