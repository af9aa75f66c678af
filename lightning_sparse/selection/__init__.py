"""How the elements that travel are chosen, and sparse vectors."""
