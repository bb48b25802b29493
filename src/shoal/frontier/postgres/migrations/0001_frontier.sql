-- The tables of a frontier, made in a schema of its own.
--
-- They are split by how often their rows change. A request is written once, so nothing ever touches the large index over
-- fingerprints again; where it stands is a small row in `ready`, then in `held`, then in `outcome`.
--
-- Whoever locks rows does it in this order, and within a table by the key, so that nobody waits for each other for ever:
-- role, held, new hosts and lanes by name, fingerprints, host, lane, ledger.
--
-- Times are seconds since 1970 by the clock of the server.

CREATE SEQUENCE batch;                        -- of requests; they are numbered by it, and within it
CREATE SEQUENCE token;                        -- of leases and roles; never given twice, also not after a crash

CREATE TABLE run (
    id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    run_id text NOT NULL UNIQUE,
    spider text NOT NULL,
    state text NOT NULL,
    created_at double precision NOT NULL,
    settings bytea NOT NULL,                  -- msgpack
    -- What its workers were told, kept here because other runs give back what they lose, and place their lanes.
    max_attempts integer NOT NULL DEFAULT 3,
    delay double precision NOT NULL DEFAULT 0,
    concurrency integer NOT NULL DEFAULT 8
);

-- How many requests of a run are in each state. Locked last, and until the commit: so the item log has no gaps that
-- are filled later.
CREATE TABLE ledger (
    run integer PRIMARY KEY,
    pushed bigint NOT NULL DEFAULT 0,
    ready bigint NOT NULL DEFAULT 0,
    waiting bigint NOT NULL DEFAULT 0,
    leased bigint NOT NULL DEFAULT 0,
    done bigint NOT NULL DEFAULT 0,
    dead bigint NOT NULL DEFAULT 0,
    duplicates bigint NOT NULL DEFAULT 0,
    items bigint NOT NULL DEFAULT 0           -- also the last sequence number of its item log
) WITH (fillfactor = 20, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_scale_factor = 0,
        autovacuum_vacuum_cost_delay = 0);

-- Politeness belongs to the store: all runs in it share it.
CREATE TABLE host (
    id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name text NOT NULL UNIQUE,
    delay double precision,
    concurrency integer,
    crawl_delay double precision,
    learned_delay double precision,
    blocked_until double precision NOT NULL DEFAULT 0,
    block_reason text NOT NULL DEFAULT '',
    in_flight integer NOT NULL DEFAULT 0,
    ended_at double precision NOT NULL DEFAULT 0   -- the last fetch
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);

-- What holds for hosts without a value of their own.
INSERT INTO host (id, name) OVERRIDING SYSTEM VALUE VALUES (0, '*');

-- One run's queue for one host. It is in one of four places; in which, is decided under the lock of its host, except
-- that anyone may open it: whoever leases from it looks at the host once more.
CREATE TABLE lane (
    id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    run integer NOT NULL,
    host integer NOT NULL,
    place smallint NOT NULL DEFAULT 0,        -- 0 empty, 1 open, 2 waits for a time, 3 its host is full
    ready integer NOT NULL DEFAULT 0,
    best_rank double precision,               -- of its best ready request
    best_id bigint,
    due double precision,                     -- in place 2: open from then on
    UNIQUE (host, run)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX lane_open ON lane (run, best_rank, best_id) WHERE place = 1;
CREATE INDEX lane_later ON lane (run, due) WHERE place = 2;
CREATE INDEX lane_full ON lane (host) WHERE place = 3;

CREATE TABLE request (
    id bigint PRIMARY KEY,                    -- ascending over all runs: first in, first out
    parent bigint,
    rank double precision NOT NULL,           -- the negative of its priority
    run integer NOT NULL,
    lane integer NOT NULL,
    fingerprint bytea NOT NULL,
    payload bytea NOT NULL                    -- the Request as msgpack
);
CREATE UNIQUE INDEX request_fingerprint ON request (run, fingerprint);

CREATE TABLE ready (
    rank double precision NOT NULL,
    id bigint NOT NULL,
    at double precision NOT NULL,
    lane integer NOT NULL,
    attempts integer NOT NULL DEFAULT 0,
    status integer NOT NULL DEFAULT 0,
    items integer NOT NULL DEFAULT 0,
    PRIMARY KEY (lane, rank, id)
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0);

CREATE TABLE held (
    token bigint PRIMARY KEY,
    id bigint NOT NULL,
    rank double precision NOT NULL,
    due double precision NOT NULL,            -- leased: lost then; waiting: ready again then
    at double precision NOT NULL,
    run integer NOT NULL,
    lane integer NOT NULL,
    host integer NOT NULL,
    attempts integer NOT NULL,
    status integer NOT NULL,
    items integer NOT NULL,
    state smallint NOT NULL,                  -- 1 waiting, 2 leased
    fingerprint bytea NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX held_due ON held (run, due);

CREATE TABLE outcome (
    id bigint PRIMARY KEY,
    at double precision NOT NULL,
    run integer NOT NULL,
    status integer NOT NULL,
    items integer NOT NULL,
    attempts smallint NOT NULL,
    state smallint NOT NULL,                  -- 3 done, 4 dead
    kind text,                                -- dead: of what
    reason text
);
CREATE INDEX outcome_dead ON outcome (run, id) WHERE state = 4;

CREATE TABLE item (
    run integer NOT NULL,
    position integer NOT NULL,
    seq bigint NOT NULL,
    fingerprint bytea NOT NULL,
    payload bytea NOT NULL,
    PRIMARY KEY (run, seq)
);

-- What is out of the ordinary in a request's life: failed attempts, lost leases, notes.
CREATE TABLE event (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    request bigint NOT NULL,
    at double precision NOT NULL,
    what text NOT NULL,
    detail text NOT NULL
);
CREATE INDEX event_request ON event (request);

CREATE TABLE role (
    run integer NOT NULL,
    role text NOT NULL,
    token bigint NOT NULL,                    -- 0: nobody's
    until double precision NOT NULL,
    cursor bytea NOT NULL,
    finished boolean NOT NULL,
    PRIMARY KEY (run, role)
) WITH (fillfactor = 50);

-- Small facts for all runs and workers.
CREATE TABLE note (
    key bytea PRIMARY KEY,
    until double precision NOT NULL,
    value bytea NOT NULL
);
CREATE INDEX note_until ON note (until);
