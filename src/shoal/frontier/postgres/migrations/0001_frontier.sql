-- The tables of a frontier, made in a schema of its own.
--
-- They are split by how often their rows change. A request is written once, so nothing ever touches the large index over
-- fingerprints again; where it stands is a small row in `ready`, then in `held`, then in `outcome`.
--
-- Whoever locks rows does it in this order, and within a table by the key, so that nobody waits for each other for ever:
-- role, held, new hosts and lanes by name, fingerprints, host, lane, ledger.
--
-- Columns named `at` are seconds since 1970, for people. All other times are those of `clock()`, which never goes back.
--
-- Tokens of leases and roles are made up by clients at random: they never repeat, also not in a restored backup.

CREATE SEQUENCE batch;                        -- of requests; they are numbered by it, and within it

CREATE TABLE run (
    -- At random: clients know runs by it, and in a restored backup another run must not get the number of a lost one.
    id integer PRIMARY KEY DEFAULT 1 + floor(random() * 2147483646)::integer,
    number bigint GENERATED ALWAYS AS IDENTITY,  -- in the order in which they were made
    run_id text NOT NULL UNIQUE,
    spider text NOT NULL,
    state text NOT NULL,
    created_at double precision NOT NULL,
    settings bytea NOT NULL,                  -- msgpack
    -- What its workers were told, kept here because other runs give back what they lose, and place their lanes.
    max_attempts integer NOT NULL DEFAULT 3,
    delay double precision NOT NULL DEFAULT 0,
    concurrency integer NOT NULL DEFAULT 8,
    deleting boolean NOT NULL DEFAULT false   -- half of it may be gone: only whoever deletes it sees it
);

-- What makes the clock steady when that of the server is set back: see clock().
CREATE TABLE clock_state (
    id integer PRIMARY KEY,
    seen double precision NOT NULL,           -- the latest time of the server that was noted
    skew double precision NOT NULL,           -- the sum of all steps back
    boot timestamptz                          -- when the server was started that leased last
) WITH (fillfactor = 10, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_scale_factor = 0);
INSERT INTO clock_state (id, seen, skew) VALUES (1, 0, 0);

-- How often clients ask for work in vain, from a sample: see spread_polls().
CREATE TABLE poll_state (
    id integer PRIMARY KEY,
    since double precision NOT NULL,          -- begin of the window
    polls double precision NOT NULL,          -- in the window so far
    poll_after double precision NOT NULL      -- what they are told
) WITH (fillfactor = 10, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_scale_factor = 0);
INSERT INTO poll_state (id, since, polls, poll_after) VALUES (1, 0, 0, 0);

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
    items bigint NOT NULL DEFAULT 0,          -- also the last sequence number of its item log
    incoming bigint NOT NULL DEFAULT 0        -- links in its stages
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
    ended_at double precision NOT NULL DEFAULT 0   -- the last fetch; of host 0: the last rewind of the store
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
    due double precision,                     -- in place 2: open from then on; in place 3: looked at again then
    UNIQUE (host, run)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX lane_open ON lane (run, best_rank, best_id) WHERE place = 1;
CREATE INDEX lane_later ON lane (run, due) WHERE place = 2;
CREATE INDEX lane_full ON lane (host, due) WHERE place = 3;
CREATE INDEX lane_again ON lane (run, due) WHERE place = 3;
CREATE INDEX lane_empty ON lane (run) WHERE place = 0;

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
    begun boolean NOT NULL,                   -- else the last of its attempts does not count yet
    epoch bigint,
    slot text,                                -- of a cluster, if whoever leased it works under one
    fingerprint bytea NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX held_due ON held (run, due);
CREATE INDEX held_overdue ON held (due);
CREATE INDEX held_slot ON held (run, slot) WHERE state = 2 AND slot IS NOT NULL;

CREATE TABLE outcome (
    id bigint PRIMARY KEY,
    token bigint NOT NULL,                    -- of the lease under which it came to this
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
    token bigint NOT NULL,                    -- of the lease under which its page was completed
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
    slot text,
    epoch bigint,
    PRIMARY KEY (run, role)
) WITH (fillfactor = 50);

-- Nothing is given to earlier epochs of these slots.
CREATE TABLE fence (
    run integer NOT NULL,
    slot text NOT NULL,
    epoch bigint NOT NULL,
    PRIMARY KEY (run, slot)
);

-- The links of a page that has too many for one short step. They are uploaded in chunks under the token of its lease.
-- When the page is completed its stage is registered; from then on clients move chunk after chunk into the queue.
CREATE TABLE stage (
    token bigint PRIMARY KEY,
    run integer NOT NULL,
    parent bigint NOT NULL,
    remaining integer NOT NULL,               -- links that are not moved yet
    added integer NOT NULL DEFAULT 0          -- of those that are: how many were new
);
CREATE INDEX stage_open ON stage (run, token) WHERE remaining > 0;

CREATE TABLE chunk (
    token bigint NOT NULL,
    number integer NOT NULL,
    run integer NOT NULL,
    size integer NOT NULL,
    hosts text[] NOT NULL,
    fingerprints bytea[] NOT NULL,
    host integer[] NOT NULL,
    ranks double precision[] NOT NULL,
    payloads bytea[] NOT NULL,
    PRIMARY KEY (token, number)
);
CREATE INDEX chunk_run ON chunk (run);

-- How often the store went back in time, as clients of a run noticed it.
CREATE TABLE rewind (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    run integer NOT NULL,
    noticed double precision NOT NULL,
    at double precision NOT NULL,
    lost_seconds double precision
);
CREATE INDEX rewind_run ON rewind (run, id);

-- Small facts for all runs and workers.
CREATE TABLE note (
    key bytea PRIMARY KEY,
    until double precision NOT NULL,
    value bytea NOT NULL
);
CREATE INDEX note_until ON note (until);
