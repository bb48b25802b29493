"""URLs: their normal form, the ones that are known already, and the ones in scope."""
