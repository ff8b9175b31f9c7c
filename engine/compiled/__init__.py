"""The decode pass in machine code: what lies between two matrix products as one call, and a lone row's pass whole."""
