-- Leases that are sent to whoever is to work, and that whoever begins has reissued.
ALTER TABLE held
    ADD COLUMN begun boolean NOT NULL DEFAULT true,   -- else the last of its attempts does not count yet
    ADD COLUMN origin bigint,                         -- the token that it was reissued from, if it was
    ADD COLUMN nonce bytea;                           -- and by whom
CREATE INDEX held_origin ON held (origin) WHERE origin IS NOT NULL;

-- They are made anew: whether a lease is begun may be left out, as earlier workers do; a nonce may not.
DROP FUNCTION IF EXISTS lease(integer, double precision, integer, double precision, double precision, text, bigint);
DROP FUNCTION IF EXISTS reissue(integer, double precision, bigint[], bytea[], double precision);
