-- The state of clock(): a clock that does not go back when the server's clock does.
CREATE TABLE clock_state (
    id integer PRIMARY KEY,
    seen double precision NOT NULL,           -- the latest time of the server that was noted
    skew double precision NOT NULL,           -- the sum of all steps back
    boot timestamptz                          -- start time of the server that leased last
) WITH (fillfactor = 10, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_scale_factor = 0);
INSERT INTO clock_state (id, seen, skew) VALUES (1, 0, 0);
