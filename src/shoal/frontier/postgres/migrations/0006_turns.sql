-- Runs that share a host: see functions/01_turns.sql.
ALTER TABLE run ADD COLUMN weight double precision NOT NULL DEFAULT 1;  -- its share of the turns

ALTER TABLE host
    ADD COLUMN last_run integer,              -- that leased from it
    ADD COLUMN shared boolean NOT NULL DEFAULT false,  -- whether it has rows in `turn`
    ADD COLUMN longest double precision;      -- the longest delay of the runs that share it

-- How a run uses a shared host. Changes only under the lock of the host.
CREATE TABLE turn (
    host integer NOT NULL,
    run integer NOT NULL,                     -- 0: this is the time of the host
    used double precision NOT NULL,           -- its turns, divided by its weight
    seen double precision NOT NULL,           -- when it last asked for the host
    PRIMARY KEY (host, run)
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_scale_factor = 0);

-- The last calls of runs that share hosts. Locked after hosts and lanes, before the ledger.
CREATE TABLE presence (
    run integer PRIMARY KEY,
    called double precision NOT NULL,         -- when it last leased or ended a lease
    asked double precision NOT NULL,          -- the same, if that lease got less than it wanted; else 0
    until double precision NOT NULL           -- these times are kept until then
) WITH (fillfactor = 10, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_scale_factor = 0);
